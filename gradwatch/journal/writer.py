"""Files made of Records: what is written of each step, when it is safe, what happens when the disk refuses.

Runs in one thread, the journal's own. Nothing here raises for a fault of the disk: it is reported, what could
not be written is counted (and the count is written when the disk is back), and events wait to be tried again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from gradwatch.checkpoint.saved_state_health import SavedStateTracker
from gradwatch.journal.columnar_steps import GroupNorms, StepRow, StepsEntry, step_row
from gradwatch.journal.entries import (
    EndEntry,
    EventsEntry,
    LostEntry,
    RunEntry,
    SavedStatesEntry,
    encode_sites,
)
from gradwatch.journal.files import JournalFiles
from gradwatch.journal.health_tag_writer import HealthTagWriter
from gradwatch.journal.norms_batch import StepNorms, encode_norms, put_together, steps_at_once, to_write
from gradwatch.journal.norms_cadence import FIRST, Cadence
from gradwatch.journal.retention import Retention
from gradwatch.records.event import Event
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.run_info import RunInfo
from gradwatch.records.saved_optimizer_state import SavedState, TakenState
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.runtime.backoff import Backoff

T = TypeVar("T")

_ROWS = 64
_ROWS_SECONDS = 1.0
_SYNC_SECONDS = 5.0
_MOST_WAITING = 1024
_RING_BYTES = 16 << 20
_BACKOFF_SECONDS = (0.25, 10.0)  # after the first failure, and at most


@dataclass(slots=True)
class _Track:
    """One optimizer's present sites, and what waits to be written of its steps.

    `generation` is that of the last file its `payload` was written to. `taken` and `norms` wait until the present batch
    is through, `rows` for up to a second.
    """

    optimizer: int
    sites_id: int
    sites: Sites
    payload: bytes
    group_norms: GroupNorms
    cadence: Cadence
    taken: list[Record] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    norms: list[StepNorms] = field(default_factory=list)
    generation: int = -1


@dataclass(slots=True)
class _Waiting:
    """Events on their way to the disk; `generation` is that of the file they were written to."""

    payload: bytes
    events: tuple[Event, ...]
    generation: int = -1
    safe: bool = False


class Recorder:
    """Writes the journal of one process.

    `report(error)` is called at every failure, and with None at the first success after one; `acknowledge(events)`
    is called once their fdatasync has returned; `pause()` between pieces of work, so that no other thread
    waits long for the interpreter. `failures` counts the calls of `report` with an error.
    """

    def __init__(
        self,
        run: RunInfo,
        params: str,
        max_bytes: int,
        report: Callable[[BaseException | None], None],
        acknowledge: Callable[[tuple[Event, ...]], None],
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.retention = Retention(max_bytes, pause)
        self.files = JournalFiles(run.directory, run.rank, run.attempt, self.retention, self._preamble)
        self._run = RunEntry(run, params=params, max_bytes=max_bytes)
        self._report = report
        self._acknowledge = acknowledge
        self._pause = pause
        self._columns = {rule.id: rule.of for rule in run.rules}
        self._tag = HealthTagWriter(run)
        self._taken: deque[TakenState] = deque(maxlen=_MOST_WAITING)  # by the thread that trains
        self._saved = SavedStateTracker()
        self._unwritten: dict[int, SavedState] = {}  # saved states, by number
        self._weights: CheckpointHealth | None = None  # by the look after the last Record
        self._tracks: dict[int, _Track] = {}
        self._waiting: deque[_Waiting] = deque()
        self._lost = LostEntry()
        self._rows_since = self._synced_at = time.monotonic()
        self._saved_at = -_ROWS_SECONDS
        self._rows_wait = 0.0  # the first rows are written at once: the process may be killed early
        self._backoff, self._events_backoff = Backoff(*_BACKOFF_SECONDS), Backoff(*_BACKOFF_SECONDS)
        self._urgent = self._failing = False
        self.end = EndEntry(0)  # written by `close`, with the number of records
        self.failures = self._rows = self._records = self._numbers = self._sites = self._rotated = 0

    def end_with(self, end: EndEntry) -> None:
        """Have the journal end with this entry; `close` adds the number of Records to it."""
        self.end = end

    def judge_weights(self, health: CheckpointHealth) -> None:
        """Have the checkpoint tag end with this: the weights were looked at once more."""
        self._tag.end_with(health)
        self._weights = health

    def take_state(self, taken: TakenState) -> None:
        """Take in a state of the script's, from any thread, before any Record of a later step."""
        self._taken.append(taken)

    def begin(self) -> None:
        """Make the first file, which says who records: a process that is killed at once has left that much."""
        self._write([])

    def record(self, batch: Sequence[Record]) -> None:
        """Take in Records, in order; their events first, acknowledged on return if the disk works."""
        self._tag.add(batch)
        self._add_saved(batch)
        for record in batch:
            if record.verdict.events or record.findings:
                self._guarded(self._add_events, record)
        if self._urgent:
            self._flush_events()
        for record in batch:
            self._guarded(self._add_step, record)
            self._pause()
        for track in self._tracks.values():
            self._write_taken(track)
        if self._rows >= _ROWS:
            self._write_rows()

    def _guarded(self, take: Callable[[Record], None], record: Record) -> None:
        """A Record that cannot be encoded must not take its neighbours with it."""
        try:
            take(record)
        except Exception as error:
            self._failed(error)
            step = record.snapshot.step
            events = len(record.verdict.events) if take == self._add_events else 0
            self.lose(LostEntry(scalars=not events, events=events, first_step=step, last_step=step))

    def _add_saved(self, batch: Sequence[Record]) -> None:
        try:
            while self._taken:
                self._saved.take(self._taken.popleft())
            self._saved.add(batch)
        except Exception as error:
            self._failed(error)

    def _write_saved(self, last: bool = False) -> None:
        """Write the saved states that are to be kept; those that the disk refuses wait, the latest of very many."""
        saved, unwritten = self._saved, self._unwritten
        unwritten |= {state.number: state for state in saved.take_kept(last)}
        if unwritten and self._write(
            [SavedStatesEntry(saved.taken, saved.healthy, tuple(unwritten.values())).encode()]
        ):
            unwritten.clear()
        while len(unwritten) > _MOST_WAITING:
            del unwritten[next(iter(unwritten))]

    def lose(self, lost: LostEntry) -> None:
        """Count what will not be written."""
        self._lost |= lost

    def commit(self, durable: bool) -> bool:
        """Write what is due, or everything and sync it where `durable`; whether that left nothing waiting."""
        now, failures = time.monotonic(), self.failures
        if durable:
            self._backoff.succeeded()
            self._events_backoff.succeeded()
        if durable or now - self._rows_since >= self._rows_wait:
            self._write_rows()
        if durable or now - self._saved_at >= _ROWS_SECONDS:
            self._saved_at = now
            self._write_saved()
        if durable and self._lost:
            self._write([])
        if durable or self._urgent or now - self._synced_at >= _SYNC_SECONDS:
            self._flush_events()
        self._keep_within_cap()
        self._write_tag(last=durable)
        return not self._waiting and self.failures == failures

    def _write_tag(self, last: bool) -> None:
        """The checkpoint tag follows what has been recorded; a disk that refuses it is asked again."""
        if self.files.path is None or not self._backoff.ready:
            return
        try:
            self._tag.write(self.files.directory, self.files.attempt, last)
        except OSError as error:
            self._failed(error)
            self._backoff.failed()

    def close(self) -> None:
        """Write everything, say that this is the end, cut the reserve off."""
        self._tag.close()
        self._add_saved(())
        self._saved.end(self._weights)
        self.commit(durable=True)
        self._write_saved(last=True)
        self._write([replace(self.end, steps=self._records).encode()])
        try:
            self.files.close()
        except OSError as error:
            self._failed(error)

    def _add_events(self, record: Record) -> None:
        snapshot, events = record.snapshot, record.verdict.events
        at = snapshot.optimizer, snapshot.step, record.wall_time
        entry = EventsEntry(self._numbers, *at, events, record.findings)
        self._numbers += 1
        self._waiting.append(_Waiting(entry.encode(), events))
        self._urgent |= bool(record.findings) or any(event.kind != "pending" for event in events)
        if len(self._waiting) > _MOST_WAITING:  # a dead disk: the first and the last are worth most
            given_up = self._waiting[_MOST_WAITING // 2]
            del self._waiting[_MOST_WAITING // 2]
            self.lose(LostEntry(events=len(given_up.events)))

    def _flush_events(self) -> None:
        """Write the events that are not in the present file, sync, acknowledge."""
        if not self._events_backoff.ready:
            return
        try:
            self._append_events()
            self._sync()
        except Exception as error:
            self._failed(error)
            self._events_backoff.failed()
            self._sync_what_fits()
        else:
            self._urgent = False
            self._events_backoff.succeeded()
            if not self._backoff.failing:
                self._works()

    def _append_events(self) -> None:
        """Write the events that are not in the present file."""
        if self._waiting:
            self._open()
        for waiting in list(self._waiting):
            if not waiting.safe and waiting.generation != self.files.generation:
                # One by one: the reserve of a full disk may hold some of them.
                self.files.append([waiting.payload], essential=True)
                waiting.generation = self.files.generation
                self._rotate_if_due()

    def _sync_what_fits(self) -> None:
        try:
            self._sync()
        except Exception as error:
            self._failed(error)

    def _sync(self) -> None:
        self.files.sync()
        self._synced_at = time.monotonic()
        while self._waiting and self._waiting[0].generation == self.files.generation:
            waiting = self._waiting.popleft()
            waiting.safe = True
            self._acknowledge(waiting.events)

    def _add_step(self, record: Record) -> None:
        self._records += 1
        snapshot = record.snapshot
        track = self._track(snapshot)
        track.taken.append(record)
        chosen = track.cadence.choose(record, self.retention.every(snapshot.optimizer), self._records)
        track.norms += [to_write(each, self._columns) for each in chosen]

    def _write_taken(self, track: _Track) -> None:
        """Make rows of the steps of this batch, and write the norms that were chosen in it."""
        taken, track.taken = track.taken, []
        norms, track.norms = track.norms, []
        if taken and not self._rows:
            self._rows_since = time.monotonic()
        most = steps_at_once(taken[0]) if taken else 1
        for at in range(0, len(taken), most):
            self._together(partial(self._add_rows, track), taken[at : at + most], _lost_records)
            self._pause()
        for alike in put_together(norms):
            self._together(partial(self._write_norms, track), alike, _lost_norms)
            self._pause()

    def _together(
        self, take: Callable[[list[T]], None], items: list[T], lost: Callable[[list[T]], LostEntry]
    ) -> None:
        """Take items at once, or, where that fails, one by one: a bad one must not take its neighbours with it."""
        try:
            take(items)
        except Exception as error:
            if len(items) > 1:
                for item in items:
                    self._together(take, [item], lost)
            else:
                self._failed(error)
                self.lose(lost(items))

    def _add_rows(self, track: _Track, records: list[Record]) -> None:
        snapshots = [record.snapshot for record in records]
        norm, calls = (
            np.array([each.norm for each in snapshots]),
            np.array([each.calls for each in snapshots]),
        )
        rows = list(
            map(step_row, records, track.group_norms(norm, calls))
        )  # all or none: else they come twice
        track.rows += rows
        self._rows += len(records)

    def _track(self, snapshot: Snapshot) -> _Track:
        """The track of the snapshot's optimizer; a new one where its sites are not those of before."""
        track = self._tracks.get(snapshot.optimizer)
        if track is not None and _same_sites(track.sites, snapshot.sites):
            return track
        for each in self._tracks.values():
            self._write_taken(each)
        self._write_rows()
        sites = snapshot.sites
        payload = encode_sites(self._sites, snapshot.optimizer, sites)
        first = track.cadence.first if track else FIRST
        full = self._run.params == "full"
        cadence = Cadence(full, _RING_BYTES, self.retention.window_bytes, first)
        track = _Track(snapshot.optimizer, self._sites, sites, payload, GroupNorms(sites), cadence)
        self._tracks[snapshot.optimizer] = track
        self.retention.bases[snapshot.optimizer] = Cadence.base(len(sites))
        self._sites += 1
        return track

    def _write_rows(self) -> None:
        if self._waiting and self._events_backoff.ready:
            try:
                self._append_events()  # not synced: but a process that is killed leaves no step without its events
            except Exception as error:
                self._failed(error)
                self._events_backoff.failed()
        for track in self._tracks.values():
            rows, track.rows = track.rows, []
            if rows:
                self._rows_wait = _ROWS_SECONDS
                self._together(partial(self._write_steps, track), rows, _lost_rows)
        self._rows = 0

    def _write_steps(self, track: _Track, rows: list[StepRow]) -> None:
        if not self._write([StepsEntry(track.optimizer, track.sites_id, rows).encode()], track):
            self.lose(_lost_rows(rows))

    def _write_norms(self, track: _Track, norms: list[StepNorms]) -> None:
        """Write norms that fit one entry; on a disk that is not to be tried yet they are not even encoded."""
        every, sampled = self.retention.every(track.optimizer), norms[0].reason in ("sample", "firing")
        if not (
            self._backoff.ready and self._write([encode_norms(track.sites_id, every, norms)], track, sampled)
        ):
            self.lose(_lost_norms(norms))

    def _write(self, payloads: list[bytes], track: _Track | None = None, sampled: bool = False) -> bool:
        """Append ordinary payloads, behind the sites they need and the count of what is missing."""
        if not self._backoff.ready:
            return False
        try:
            self._open()
            ahead = [self._lost.encode()] if self._lost else []
            if track is not None and track.generation != self.files.generation:
                ahead.append(track.payload)
            self.files.append([*ahead, *payloads], sampled=sampled)
            if track is not None:
                track.generation = self.files.generation
            self._rotate_if_due()
        except Exception as error:
            self._failed(error)
            self._backoff.failed()
            return False
        self._lost = LostEntry()
        self._works()
        return True

    def _open(self) -> None:
        before = self.files.generation
        self.files.ensure_open()
        if self.files.generation != before:
            for track in self._tracks.values():
                track.generation = self.files.generation

    def _preamble(self, attempt: int, segment: int) -> list[bytes]:
        run = replace(self._run, run=replace(self._run.run, attempt=attempt), segment=segment)
        return [run.encode(), *(track.payload for track in self._tracks.values())]

    def _rotate_if_due(self) -> None:
        if self.files.due_for_rotation:
            self._sync()
            self.files.rotate()
            self._open()

    def _keep_within_cap(self) -> None:
        try:
            self._rotate_if_due()
            working = self.retention.behind
            while working:
                working = self.retention.relieve() and self.retention.over
        except Exception as error:
            self._failed(error)
        rotated, self._rotated = self.retention.rotated - self._rotated, self.retention.rotated
        self.lose(LostEntry(rotated=rotated))

    def _failed(self, error: BaseException) -> None:
        self._failing = True
        self.failures += 1
        self._report(error)

    def _works(self) -> None:
        if self._failing:
            self._failing = False
            self._report(None)


def _lost_records(records: list[Record]) -> LostEntry:
    steps = [record.snapshot.step for record in records]
    return LostEntry(scalars=len(steps), first_step=min(steps), last_step=max(steps))


def _lost_rows(rows: list[StepRow]) -> LostEntry:
    steps = [row.step for row in rows]
    return LostEntry(scalars=len(steps), first_step=min(steps), last_step=max(steps))


def _lost_norms(norms: list[StepNorms]) -> LostEntry:
    steps = [each.record.snapshot.step for each in norms]
    return LostEntry(norms=len(steps), first_step=min(steps), last_step=max(steps))


def _same_sites(one: Sites, other: Sites) -> bool:
    if one is other:
        return True
    labels = one.names == other.names and one.groups == other.groups and one.kinds == other.kinds
    return labels and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("numels", "ndims", "depths")
    )
