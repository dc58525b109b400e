"""Norms chosen in one batch of Records, in as few entries as can hold them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gradwatch.journal.norms_block import NormsBlock, block_arrays
from gradwatch.journal.norms_cadence import Chosen, record_bytes
from gradwatch.journal.norms_entry import NormsEntry, Reason
from gradwatch.records.histogram import Histogram
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Column

_MOST_STEPS = 64
_MOST_BYTES = 128 << 10


class StepNorms(NamedTuple):
    """A step of which norms are to be written, with the columns and histograms that go with them."""

    record: Record
    reason: Reason
    columns: Mapping[str, Column]
    histograms: Mapping[int, Histogram]

    @property
    def kind(self) -> Hashable:
        """Equal for steps that one block can hold."""
        firing = self.record.verdict.firing
        if self.histograms:
            return self.record.snapshot.step  # alone
        if not (self.columns or firing):
            return self.reason
        columns = tuple((name, column.values.dtype.char) for name, column in self.columns.items())
        return self.reason, columns, tuple(firing)


def to_write(chosen: Chosen, rule_columns: Mapping[str, str]) -> StepNorms:
    """The parts of a chosen step to write; `rule_columns` names the column that each rule is about, "" a total or none.

    Where a step is written because a rule over one column fires, no other column goes with it.
    """
    record, reason = chosen
    snapshot = record.snapshot
    if reason == "firing":
        firing = record.verdict.firing.items()
        wanted = {rule_columns.get(rule, "") for rule, mask in firing if mask.any()}
        if "" not in wanted:
            columns = snapshot.columns.items()
            return StepNorms(
                record, reason, {name: each for name, each in columns if name.partition(":")[0] in wanted}, {}
            )
    return StepNorms(record, reason, snapshot.columns, snapshot.histograms)


def put_together(norms: Iterable[StepNorms]) -> Iterator[list[StepNorms]]:
    """Norms that go into one entry, in order of their steps."""
    alike: dict[Hashable, list[StepNorms]] = {}
    for each in norms:
        alike.setdefault(each.kind, []).append(each)
    for group in alike.values():
        most = steps_at_once(group[0].record)
        yield from (group[at : at + most] for at in range(0, len(group), most))


def steps_at_once(record: Record) -> int:
    """Steps like this one whose arrays are worked on at once, without letting go of the interpreter."""
    return max(1, min(_MOST_STEPS, _MOST_BYTES // max(1, record_bytes(record))))


def encode_norms(sites_id: int, every: int, norms: Sequence[StepNorms]) -> bytes:
    """The payload of the entry that holds these steps, all of one kind."""
    first = norms[0]
    snapshot, firing = first.record.snapshot, first.record.verdict.firing
    if len(norms) > 1:
        arrays = block_arrays([each.record for each in norms], [each.columns for each in norms])
        steps = np.array([each.record.snapshot.step for each in norms], np.int64)
        head = snapshot.optimizer, sites_id, first.reason, every, tuple(first.columns), tuple(firing)
        return NormsBlock(*head, steps, arrays).encode()
    return NormsEntry(
        optimizer=snapshot.optimizer,
        step=snapshot.step,
        sites_id=sites_id,
        reason=first.reason,
        every=every,
        norm=snapshot.norm,
        calls=snapshot.calls,
        coef=snapshot.coef,
        columns=first.columns,
        firing=firing,
        histograms=first.histograms,
    ).encode()
