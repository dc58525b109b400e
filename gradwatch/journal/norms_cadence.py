"""Choice of steps whose per-parameter norms are written: pure bookkeeping, no files, no clock."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gradwatch.journal.norms_entry import Reason
from gradwatch.records.record import Record

FIRST = 1_000
AROUND = 200
_BYTES_A_STEP = 4096


class Chosen(NamedTuple):
    """A step whose norms are to be written, and why."""

    record: Record
    reason: Reason


class Cadence:
    """Chooses for one optimizer and one set of sites.

    The first 1,000 steps; 200 before and 200 after each incident; every step while a rule over sites is
    firing; all others once in `every` steps. The steps before an incident are held by reference in a ring,
    at most `ring_bytes` of memory; the first steps, and those after an incident, count as such until their
    norms have taken `window_bytes` of the journal, then like any other. `full` chooses every step. `first` is
    how many first steps are left: a change of sites does not begin them anew.
    """

    def __init__(self, full: bool, ring_bytes: int, window_bytes: float, first: int = FIRST) -> None:
        self._full = full
        self._ring_bytes = ring_bytes
        self._ring: deque[tuple[int, Record]] = deque()
        self._held = 0
        self.first = first
        self._first_bytes = self._window_bytes = window_bytes
        self._after = 0
        self._after_bytes = 0.0

    @staticmethod
    def base(sites: int) -> int:
        """The cadence to begin with, a power of two: about 4 KiB of norms a step on average."""
        return 1 << max(0, (4 * sites // _BYTES_A_STEP).bit_length() - 1)

    def choose(self, record: Record, every: int, now: int) -> list[Chosen]:
        """Choose the norms to write after this record, in the order of steps.

        `now` counts records of all optimizers; the ring discards what is over 400 of them old, which bounds
        how late norms can follow their step.
        """
        reason = self._reason(record, every)
        self._expire(record.snapshot.step, now)
        if reason is None:
            self._ring.append((now, record))
            self._held += record_bytes(record)
            return []
        before = [Chosen(held, "incident") for _, held in self._ring] if reason == "incident" else []
        if before:
            self._ring.clear()
            self._held = 0
        return [*before, Chosen(record, reason)]

    def _reason(self, record: Record, every: int) -> Reason | None:
        size = record.snapshot.norm.nbytes
        if any(event.kind == "firing" for event in record.verdict.events):
            self._after, self._after_bytes = AROUND, self._window_bytes
            return "incident"
        if self.first > 0 and self._first_bytes > 0:
            self.first, self._first_bytes = self.first - 1, self._first_bytes - size
            return "first"
        if self._after > 0 and self._after_bytes > 0:
            self._after, self._after_bytes = self._after - 1, self._after_bytes - size
            return "incident"
        if self._full:
            return "full"
        if any(mask.any() for mask in record.verdict.firing.values()):
            return "firing"
        return "sample" if record.snapshot.step % every == 0 else None

    def _expire(self, step: int, now: int) -> None:
        """Discard what is out of reach of an incident at `step`."""
        while self._ring:
            since, oldest = self._ring[0]
            near = oldest.snapshot.step >= step - AROUND and since > now - 2 * AROUND
            if near and self._held <= self._ring_bytes:
                return
            self._ring.popleft()
            self._held -= record_bytes(oldest)


def record_bytes(record: Record) -> int:
    """Bytes of the arrays a Record keeps alive; norm, calls and coef take 4 bytes a site each."""
    snapshot = record.snapshot
    size = 3 * snapshot.norm.nbytes
    for column in snapshot.columns.values():
        size += column.values.nbytes + column.present.nbytes
    for one in snapshot.histograms.values():
        size += one.counts.nbytes
    return size
