"""The half that the sinks for experiment trackers share: Points wait in a bounded queue, a thread hands them over."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import BackgroundWorker, Job
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.parameter_selection import ParameterChoice
from gradwatch.sinks.prometheus.run_totals import NAMES_LEFT_OUT
from gradwatch.sinks.registry import state_restored
from gradwatch.sinks.trackers.incident_list import IncidentList
from gradwatch.sinks.trackers.parameter_series import LEFT_OUT_NOTICE
from gradwatch.sinks.trackers.points import MOST_HISTOGRAMS, NO_PARAMETERS, Point, Points

MAX_QUEUE = 1024
DEFAULT_EVERY = 10
_BATCH = 64
_PERIOD_SECONDS = 1.0
NO_HISTOGRAMS = "{} keeps no histograms: those that `histograms:` asks for are not sent there"
TOO_MANY_HISTOGRAMS = (
    f"histograms of {MOST_HISTOGRAMS} parameters and as many modules are sent, not of all: "
    "see `histograms:`, `params:` and `modules:`"
)
_FULL = BufferError("the tracker does not keep up: points are being dropped")


class Tracker(ABC):
    """A Sink that sends to an experiment tracker; a subclass does the sending.

    Only rank 0 sends: the norms are those of the whole job. `load` is called on the training thread, when the run is
    opened; `start`, `send` and `finish` in a thread, in this order. What they raise is counted in `Health`, and
    tried again after 1, 2, 4 … 60 s with the same points. At most 1,024 points wait; then the oldest go, are counted in
    `Health` as "NAME-queue", and in the series `gradwatch/dropped_points_total`. A forked child sends nothing. `choice`
    says which parameters have series of their own.
    """

    name: str
    close_seconds = 2.0
    takes_histograms = True

    def __init__(
        self, every: int, background_worker: BackgroundWorker, choice: ParameterChoice = NO_PARAMETERS
    ) -> None:
        Points(every=every)  # refuses what is not a number of steps
        self._every, self._choice, self._worker = every, choice, background_worker
        self._points = Points()
        self._incidents = IncidentList()
        self._lock = threading.Lock()
        self._queue: deque[Point] = deque()
        self._dropped = 0
        self._run, self._health = RunInfo("", ""), Health()
        self._job: Job | None = None
        self._started = self._stopped = self._ended = False

    @abstractmethod
    def load(self, run: RunInfo) -> None:
        """Import the library: imports may draw from Python's generator, which only this thread can restore."""

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Begin a run with the tracker; called again where it raised."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Hand these over; called again with the same ones where it raised."""

    @abstractmethod
    def finish(self, stopped: bool) -> None:
        """End the run; `stopped`: a rule ended training. `_incidents` has what was noted of all that was sent."""

    def open(self, run: RunInfo, health: Health) -> None:
        """Import the library, and get a thread; every rank but 0 stays silent."""
        if run.rank != 0 or self._job is not None:
            return
        self._run, self._health = run, health
        self._points = Points(run.rules, self._every, self._choice)
        with state_restored():
            self.load(run)
        self._job = self._worker.enter(self.name, self._deliver, health)
        self._worker.wake(self._job)  # from now on a round a second

    def write(self, record: Record) -> None:
        """Keep one step where it is due; microseconds, whatever the tracker does."""
        if self._job is None or self._job.inherited:
            return
        self._stopped |= record.decision.stop
        point = self._points.observe(record)
        if self._points.names_left_out:
            self._health.notice(self.name, NAMES_LEFT_OUT)
        if point is not None and point.histograms and not self.takes_histograms:
            self._health.notice(self.name, NO_HISTOGRAMS.format(self.name))
            point = replace(point, histograms={}) if point.values else None
        if point is None:
            return
        if self._points.without_histogram:
            self._health.notice(self.name, TOO_MANY_HISTOGRAMS)
        if self._points.left_out:
            self._health.notice(self.name, LEFT_OUT_NOTICE.format(self._choice.max_series))
        with self._lock:
            full = len(self._queue) >= MAX_QUEUE
            if full:
                self._queue.popleft()
                self._dropped += 1
            values = {**point.values, f"{point.prefix}dropped_points_total": self._dropped}
            self._queue.append(replace(point, values=values))
        if full:
            self._health.report(f"{self.name}-queue", _FULL)
        if point.notes:
            self._worker.wake(self._job)

    def flush(self, timeout: float) -> bool:
        """Wait until the tracker has what was written; False where it has not after `timeout` seconds."""
        if self._job is None or self._job.inherited:
            return True
        return self._worker.wait_for(self._job, timeout)

    def close(self) -> None:
        """Hand over what waits and end the run; gives up after `close_seconds`."""
        ended, self._job = self._job, None
        if ended is None or ended.inherited:
            return
        self._ended = True
        if not self._worker.wait_for(ended, self.close_seconds):
            self._health.report(self.name, TimeoutError(f"{self.name} did not take the last points in time"))
        self._worker.leave(ended)

    def _deliver(self) -> float | None:
        """One round: everything that waits, in batches; in the worker's thread."""
        while batch := self._waiting():
            if not self._started:
                self.start(self._run)
                self._started = True
            self._incidents.add(batch)
            self.send(batch)
            self._discard(batch)
        if self._ended:
            if self._started:
                self._started = False
                self.finish(self._stopped)
            return None
        return _PERIOD_SECONDS

    def _waiting(self) -> list[Point]:
        with self._lock:
            return list(islice(self._queue, _BATCH))

    def _discard(self, sent: list[Point]) -> None:
        """Take off what was sent, and is still there: a full queue lost its oldest meanwhile."""
        last = sent[-1]
        with self._lock:
            if any(point is last for point in islice(self._queue, _BATCH)):
                while self._queue.popleft() is not last:
                    pass
