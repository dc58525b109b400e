"""Records made of entries again: the scalars, the norms and the events of each step joined.

The writer promises that whatever belongs to a step is written within `HORIZON` steps of its scalars, so the
join needs no second pass and no index: a window of that many steps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from gradwatch.journal.columnar_steps import StepRow, StepsEntry
from gradwatch.journal.entries import Entry, EventsEntry, RunEntry, SitesEntry
from gradwatch.journal.norms_entry import NormsEntry
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.records.verdict import Verdict

HORIZON = 1024
_KEPT = 4 * HORIZON

Key = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """One step read back.

    `record` is the Record the sinks saw, with these limits: where `norms` is None no per-site value was
    recorded at this step, and its snapshot says `calls == 0` for every site, so rules over sites must pass it
    by; `verdict.breaching` is never recorded, `verdict.firing` only with the norms. `groups` holds the norm
    of each label group, recorded every step.
    """

    record: Record
    groups: Mapping[str, float]
    norms: NormsEntry | None


@dataclass(slots=True)
class _Join:
    """The entries read of the steps still in the window."""

    sites: dict[int, Sites] = field(default_factory=dict)
    waiting: deque[tuple[int, Sites, StepRow]] = field(default_factory=deque)
    norms: OrderedDict[Key, NormsEntry] = field(default_factory=OrderedDict)
    events: OrderedDict[Key, EventsEntry] = field(default_factory=OrderedDict)

    def add(self, entry: Entry) -> None:
        if isinstance(entry, RunEntry):
            self.sites.clear()  # a new file: it brings its own sites
        elif isinstance(entry, SitesEntry):
            self.sites[entry.sites_id] = entry.sites
        elif isinstance(entry, NormsEntry):
            _keep(self.norms, (entry.optimizer, entry.step), entry)
        elif isinstance(entry, EventsEntry):
            _keep(self.events, (entry.optimizer, entry.step), entry)
        elif isinstance(entry, StepsEntry) and entry.sites_id in self.sites:
            sites = self.sites[entry.sites_id]
            self.waiting.extend((entry.optimizer, sites, row) for row in entry.rows)

    def release(self, leave: int) -> Iterator[RecordedStep]:
        while len(self.waiting) > leave:
            optimizer, sites, row = self.waiting.popleft()
            key = (optimizer, row.step)
            norms = self.norms.pop(key, None)
            if norms is not None and len(norms.norm) != len(sites):
                norms = None  # the sites it was measured on are not the ones at hand
            yield _recorded(optimizer, sites, row, norms, self.events.pop(key, None))


def join_records(entries: Iterable[Entry]) -> Iterator[RecordedStep]:
    """The steps of a journal in the order recorded, each with what belongs to it."""
    join = _Join()
    for entry in entries:
        join.add(entry)
        yield from join.release(HORIZON)
    yield from join.release(0)


def _keep(window: OrderedDict[Key, T], key: Key, value: T) -> None:
    """Keep what may still find its step; steps that were lost must not pile up."""
    window[key] = value
    if len(window) > _KEPT:
        window.popitem(last=False)


def _recorded(
    optimizer: int, sites: Sites, row: StepRow, norms: NormsEntry | None, reported: EventsEntry | None
) -> RecordedStep:
    size = len(sites)
    snapshot = Snapshot(
        optimizer=optimizer,
        step=row.step,
        sites=sites,
        norm=norms.norm if norms else np.zeros(size, np.float32),
        calls=norms.calls if norms else np.zeros(size, np.int32),
        coef=norms.coef if norms else np.ones(size, np.float32),
        total_norm=row.total_norm,
        total_norm_applied=row.total_norm_applied,
        loss_scale=row.loss_scale,
        columns=norms.columns if norms else {},
        scalars=row.scalars,
        micro=row.micro,
        provisional=row.provisional,
        coverage=row.coverage,
        histograms=norms.histograms if norms else {},
    )
    verdict = Verdict(firing=norms.firing if norms else {}, events=reported.events if reported else ())
    spent = row.overhead_seconds, row.step_seconds, row.wall_time
    findings = reported.findings if reported else ()
    record = Record(snapshot, verdict, row.decision, *spent, findings=findings)
    return RecordedStep(record, row.groups, norms)
