"""Collects what is news for people and sends it: grouped, rarely, again until it has arrived."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from gradwatch.records.event import Severity
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import Job, background_worker
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.process_identity import prints
from gradwatch.sinks.notify.alerts import Alerts
from gradwatch.sinks.notify.message import Message, message

_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Options of every sink that writes to people: the rules that are written of, and when.

    The first message leaves `group_seconds` after a rule of at least `severity` fires (one fault fires several rules
    within some steps), the next at least `every_seconds` after it; `clock` returns seconds. Raises ValueError for
    seconds that are negative or not finite.
    """

    group_seconds: float = 5.0
    every_seconds: float = 60.0
    severity: Severity = "warning"
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not (0 <= self.group_seconds < math.inf and 0 <= self.every_seconds < math.inf):
            raise ValueError("group_seconds and every_seconds must be 0 or more")


class Notifier(ABC):
    """Base of the sinks that write to people by a `Schedule`; of a job's ranks only rank 0 does.

    At a stop of training, and at the end of the run, what is left leaves at once. A rule is said to fire once, and
    once to be over. A message that does not arrive is sent again, with what is news by then, after 1, 2, 4 … 60 s;
    failures are counted under `name` and never reach training.
    """

    name: str

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._clock = schedule, schedule.clock
        self._lock = threading.Lock()
        self._alerts = Alerts(schedule.severity)
        self._since: float | None = None  # the first news that is not sent
        self._sent = -math.inf
        self._at_once = False
        self._run, self._health = RunInfo("", ""), Health()
        self._job: Job | None = None
        self._recorded = True

    @abstractmethod
    def prepare(self) -> None:
        """Look up secrets; raises AttachError where one is missing."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send one message, in the worker's thread; bounded in time; raises OSError where it does not arrive."""

    def report(self, error: Exception) -> None:
        """Count a failure that is no reason to send again."""
        self._health.report(self.name, error)

    def run_is_recorded(self, recorded: bool) -> None:
        """Say whether a journal is written, which the commands that messages name read."""
        self._recorded = recorded

    def open(self, run: RunInfo, health: Health) -> None:
        """Look up secrets and get a worker; nothing is sent before a rule fires."""
        self._run, self._health = run, health
        if not prints():
            return
        self.prepare()
        if self._job is None:
            self._job = background_worker().enter(self.name, self._deliver, health)

    def write(self, record: Record) -> None:
        """Take the transitions of one step: nothing at all on most."""
        if self._job is None or not (record.verdict.events or record.findings) or not prints():
            return
        with self._lock:
            news = self._alerts.observe(record)
            if news and self._since is None:
                self._since = self._clock()
        if news:
            background_worker().wake(self._job)

    def flush(self, timeout: float) -> bool:
        """Send what is news at once; False where it has not arrived after `timeout` seconds."""
        if self._job is None or self._job.inherited:
            return True
        with self._lock:
            if self._since is None:
                return True
            self._at_once = True
        return background_worker().wait_for(self._job, timeout)

    def close(self) -> None:
        """Send what is left, waiting for it at most 2 s."""
        if not self.flush(_CLOSE_SECONDS):
            self._health.report(self.name, TimeoutError("the last message did not arrive in time"))
        ended, self._job = self._job, None
        if ended is not None:
            background_worker().leave(ended)

    def _deliver(self) -> float | None:
        """Send what is news if it is time, in the worker's thread; seconds to the next time."""
        now = self._clock()
        with self._lock:
            at_once, since = self._at_once, self._since
            self._at_once = False
            if since is None:
                return None
            schedule = self._schedule
            due = now if at_once else max(since + schedule.group_seconds, self._sent + schedule.every_seconds)
            if now < due:
                return due - now
            news, dropped = self._alerts.news(), self._alerts.dropped
            self._since = None  # what comes while this is on its way has a time of its own
        try:
            if news:
                self.send(message(self._run, news, dropped, self._recorded))
        except BaseException:
            with self._lock:
                self._at_once, self._since = self._at_once or at_once, since
            raise
        with self._lock:
            if news:
                self._alerts.confirm(news, dropped)
                self._sent = now
            if self._since is None and self._alerts.news():
                self._since = now
            return None if self._since is None else self._schedule.every_seconds
