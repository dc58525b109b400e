"""The journal as a sink: the training thread hands over a reference, one daemon thread does the rest.

Nothing the training thread calls here waits for a disk: `write` takes a lock that is never held over work.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakSet

from gradwatch.account import Account
from gradwatch.journal.entries import EndEntry, LostEntry
from gradwatch.journal.norms_cadence import record_bytes
from gradwatch.journal.retention import Retention
from gradwatch.journal.writer import Recorder
from gradwatch.records.event import Event
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.run_info import RunInfo
from gradwatch.records.saved_optimizer_state import TakenState
from gradwatch.runtime.internal_errors import Health

MAX_QUEUE = 1024
_FOR_EVENTS = 256
_MAX_QUEUED_BYTES = 32 << 20
_WAKE_AT = 256
_BATCH = 64
_POLL_SECONDS = 0.25
_CLOSE_SECONDS = 1.5
_PIECE_SECONDS = 100e-6
_REST_SECONDS = 200e-6
_FULL = BufferError("the journal's queue is full: records are being dropped")


class _Queued(NamedTuple):
    """A Record that waits, and the bytes it keeps alive."""

    record: Record
    size: int


class _Work(NamedTuple):
    """A batch that the writer takes from the queue; `flush`: the request this batch completes, or 0."""

    batch: list[Record]
    dropped: LostEntry
    flush: int
    closing: bool


class JournalSink:
    """Records a run into `RunInfo.directory`, one journal per rank and attempt (format: `gradwatch.journal`).

    `params`: "sampled" writes per-parameter norms of the first 1,000 steps, of 200 steps either side of an
    incident and of 1 step in k; "full" those of every step. `max_bytes` caps the journal of this process
    (0 = no cap): files of the middle are thinned, the first and the last stay.
    `on_acknowledged(event)` is called in the journal's thread once an event is durable.

    At most 1,024 records and 32 MiB wait for the disk, the last quarter of the queue for records with events;
    more are dropped, counted in `Health` as "journal-queue" and in the journal itself. Faults of the disk are
    counted as "journal"; they never raise. In a forked child the sink is inert. One sink records one run.
    """

    name = "journal"
    needs_place = True

    def __init__(
        self,
        params: Literal["sampled", "full"] = "sampled",
        max_bytes: int = 64 << 20,
        on_acknowledged: Callable[[Event], None] | None = None,
    ) -> None:
        if params not in ("sampled", "full"):
            raise ValueError(f"params is 'sampled' or 'full', not {params!r}")
        Retention(max_bytes)  # refuses a cap too small to work with
        self.params = params
        self.max_bytes = max_bytes
        self.on_acknowledged = on_acknowledged
        self.dropped = 0
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._accepted = self._taken = 0
        self._flush_asked = self._flush_answered = self._flush_target = 0
        self._flush_safe = False
        self._draining = self._closing = self._open = False
        self._unrecorded = LostEntry()
        self._thread: threading.Thread | None = None
        self._recorder: Recorder | None = None
        self._health = Health()
        self._piece_began = 0.0
        _live.add(self)

    @property
    def path(self) -> Path | None:
        """The file being written; None while there is none."""
        return self._recorder.files.path if self._recorder else None

    def open(self, run: RunInfo, health: Health) -> None:
        """Start the writer. The disk is first touched in its thread, so a slow one delays no step."""
        if self._thread is not None:
            raise RuntimeError("a JournalSink records one run")
        self._health = health
        self._recorder = Recorder(
            run, self.params, self.max_bytes, self._report, self._acknowledge, self._rest
        )
        self._thread = threading.Thread(target=self._run, name="gradwatch-journal", daemon=True)
        self._open = True  # before the thread runs: from there on `close` ends it
        self._thread.start()
        health.mark(self.name, True)

    def write(self, record: Record) -> None:
        """Hand a Record over, by reference; microseconds, whatever the disk does."""
        self.write_all((record,))

    def write_all(self, records: Sequence[Record]) -> None:
        """Hand several Records over, in order, as `write` does one."""
        if not self._open:
            return
        queued = [_Queued(record, record_bytes(record)) for record in records]
        with self._lock:
            taken = [self._enqueue(each) for each in queued]
            if self._draining:
                self._condition.notify_all()
        for _ in range(taken.count(False)):
            self._health.report("journal-queue", _FULL)

    def _enqueue(self, each: _Queued) -> bool:
        """Append to the queue where there is room; whether there was. The lock is held."""
        urgent, waiting = bool(each.record.verdict.events), len(self._queue)
        light = self._queued_bytes + each.size <= _MAX_QUEUED_BYTES or urgent or not waiting
        if not light or waiting >= (MAX_QUEUE if urgent else MAX_QUEUE - _FOR_EVENTS):
            self._drop(each.record)
            return False
        self._queue.append(each)
        self._queued_bytes += each.size
        self._accepted += 1
        self._draining |= urgent or waiting >= _WAKE_AT
        return True

    def _drop(self, record: Record) -> None:
        step, events = record.snapshot.step, len(record.verdict.events)
        self.dropped += 1
        self._unrecorded |= LostEntry(queue=1, events=events, first_step=step, last_step=step)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was written so far is durable.

        False if it is not after `timeout` seconds, or as soon as the disk refuses some of it.
        """
        if not self._open:
            return True
        deadline = time.monotonic() + timeout
        with self._condition:
            failures = self._failures
            self._flush_target = self._accepted
            self._flush_asked += 1
            asked = self._flush_asked
            self._condition.notify_all()
            while self._flush_answered < asked and (left := deadline - time.monotonic()) > 0:
                self._condition.wait(left)
            return self._flush_answered >= asked and self._flush_safe and self._failures == failures

    def take_state(self, taken: TakenState) -> None:
        """Hand over that the script has taken a state; microseconds, whatever the disk does."""
        if self._open and self._recorder is not None:
            self._recorder.take_state(taken)

    def judge_weights(self, health: CheckpointHealth) -> None:
        """Have the checkpoint tag end with this."""
        if self._recorder is not None:
            self._recorder.judge_weights(health)

    def conclude(self, account: Account) -> None:
        """Have the end of the journal carry the account of the process."""
        if self._recorder is not None:
            self._recorder.end_with(EndEntry(0, account.ended or "finished", account.to_dict()))

    def close(self) -> None:
        """Write what is queued and end the journal; gives up after 1.5 s where the disk hangs."""
        thread = self._thread
        if not self._open or thread is None:
            return
        with self._condition:
            self._open = False
            self._closing = True
            self._condition.notify_all()
        if thread.ident is None:  # it could not be started
            return
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            self._health.report(
                self.name, TimeoutError("the disk did not respond in time: the journal has no end")
            )
        self._health.mark(self.name, False)

    @property
    def _failures(self) -> int:
        return self._recorder.failures if self._recorder else 0

    def _run(self) -> None:
        recorder = self._recorder
        assert recorder is not None
        recorder.begin()
        closing = False
        while not closing:
            work = self._take()
            closing, safe = work.closing, False
            try:
                recorder.lose(work.dropped)
                recorder.record(work.batch)
                safe = recorder.commit(durable=work.flush > 0)
                if closing:
                    recorder.close()
            except Exception as error:
                recorder.lose(LostEntry(scalars=len(work.batch)))
                self._health.report(self.name, error)
            self._answer(work.flush, safe)

    def _take(self) -> _Work:
        """Up to 64 records, once there is a reason to work: an event, a flush, a long queue, or the time."""
        with self._condition:
            self._condition.wait_for(self._awake, _POLL_SECONDS)
            self._piece_began = time.perf_counter()
            queued = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._queued_bytes -= sum(each.size for each in queued)
            batch = [each.record for each in queued]
            self._taken += len(batch)
            self._draining = bool(self._queue)
            dropped, self._unrecorded = self._unrecorded, LostEntry()
            flush = self._flush_asked if self._flush_due and self._taken >= self._flush_target else 0
            return _Work(batch, dropped, flush, self._closing and not self._queue)

    @property
    def _flush_due(self) -> bool:
        return self._flush_asked > self._flush_answered

    def _awake(self) -> bool:
        return self._draining or self._closing or self._flush_due

    def _answer(self, flush: int, safe: bool) -> None:
        if flush:
            with self._condition:
                self._flush_answered, self._flush_safe = flush, safe
                self._condition.notify_all()

    def _rest(self) -> None:
        """Let other threads have the interpreter after 0.1 ms of work, unless the queue is running full."""
        if time.perf_counter() - self._piece_began <= _PIECE_SECONDS:
            return
        hurried = self._closing or self._flush_due or len(self._queue) >= MAX_QUEUE // 2
        if not hurried:
            time.sleep(_REST_SECONDS)
        self._piece_began = time.perf_counter()

    def _report(self, error: BaseException | None) -> None:
        if error is not None:
            self._health.report(self.name, error)
        self._health.mark(self.name, error is None)

    def _acknowledge(self, events: tuple[Event, ...]) -> None:
        if self.on_acknowledged is None:
            return
        for event in events:
            try:
                self.on_acknowledged(event)
            except Exception as error:
                self._health.report(self.name, error)

    def _discard(self) -> None:
        """Use no thread, no file and no lock of the parent's, in a forked child."""
        self._open = False
        self._thread = None
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._queue.clear()
        if self._recorder is not None:
            self._recorder.files.discard()


_live: WeakSet[JournalSink] = WeakSet()


def _discard_all() -> None:
    for sink in list(_live):
        sink._discard()


os.register_at_fork(after_in_child=_discard_all)
