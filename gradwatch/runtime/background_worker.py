"""One thread for every sink that talks to a network or writes to a slow disk; training waits for neither.

A sink hands over a *job*: something to do, done again after the seconds it asks for and whenever it is woken.
Rounds take turns, so what one may wait for must be bounded (a timeout on every request); what is not gets a
`BackgroundWorker` of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from gradwatch.runtime.backoff import Backoff
from gradwatch.runtime.internal_errors import Health

THREAD_NAME = "gradwatch-worker"
_BACKOFF_SECONDS = (1.0, 60.0)  # after the first failure, and at most

Work = Callable[[], float | None]
"""Does what is due and returns the seconds to the next time, None for not before being woken."""


class Job:
    """Job of one sink, and its result; made by `BackgroundWorker.enter`.

    A failure is counted in `health`, and the job done again after 1, 2, 4 … 60 s: a server that is away is
    not asked at every step of a bad phase.
    """

    def __init__(self, name: str, work: Work, health: Health) -> None:
        self.name, self.work, self.health = name, work, health
        self.due: float | None = None
        self.backoff = Backoff(*_BACKOFF_SECONDS)
        self.asked = self.done = 0
        self._pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """True if the job belongs to the process that this one was forked from: nothing runs here."""
        return self._pid != os.getpid()

    def make(self) -> float | None:
        """Do what is due, whatever comes of it; returns the seconds to the next time."""
        try:
            again = self.work()
        except Exception as error:
            self.health.report(self.name, error)
            self.health.mark(self.name, False)
            return self.backoff.failed()
        self.health.mark(self.name, True)
        self.backoff.succeeded()
        return again


class BackgroundWorker:
    """The thread, and the jobs it does; it ends when no sink has anything for it any more."""

    def __init__(self, name: str = THREAD_NAME) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None

    def enter(self, name: str, work: Work, health: Health) -> Job:
        """Take a job on; nothing is done before it is woken. RuntimeError where no thread can be had."""
        made = Job(name, work, health)
        with self._condition:
            self._jobs.append(made)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return made

    def wake(self, one: Job) -> None:
        """Wake a job; returns at once. One that failed waits its time all the same."""
        with self._condition:
            one.asked += 1
            one.due = one.backoff.until
            self._condition.notify_all()

    def wait_for(self, one: Job, timeout: float) -> bool:
        """Have a job done once more, from now on; False where that fails or takes longer."""
        if one.inherited:
            return True  # the parent's thread is at work
        deadline = time.monotonic() + timeout
        with self._condition:
            one.asked += 1
            asked, one.due = one.asked, 0.0
            self._condition.notify_all()
            while one.done < asked and one in self._jobs and (left := deadline - time.monotonic()) > 0:
                self._condition.wait(left)
            return one.done >= asked and not one.backoff.failing

    def leave(self, one: Job) -> None:
        """Discard a job; the thread ends with the last one. Idempotent."""
        if one.inherited:
            return
        with self._condition:
            if one in self._jobs:
                self._jobs.remove(one)
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                one = self._next()
                if one is None:
                    self._thread = None
                    return
                asked, one.due = one.asked, None
            again = one.make()
            with self._condition:
                one.done = max(one.done, asked)
                if again is not None and one.due is None:
                    one.due = time.monotonic() + again
                self._condition.notify_all()

    def _next(self) -> Job | None:
        """The job that is due, once one is; None where there are none left."""
        while self._jobs:
            waiting = [one for one in self._jobs if one.due is not None]
            first = min(waiting, key=lambda one: one.due or 0.0, default=None)
            pause = None if first is None or first.due is None else first.due - time.monotonic()
            if first is not None and pause is not None and pause <= 0:
                return first
            self._condition.wait(pause)
        return None


_shared = BackgroundWorker()


def background_worker() -> BackgroundWorker:
    """The worker of this process."""
    return _shared


def _after_fork_in_child() -> None:
    """The thread stayed with the parent, and so may a lock that it held."""
    global _shared
    _shared._condition = threading.Condition()
    _shared._jobs.clear()
    _shared = BackgroundWorker()


os.register_at_fork(after_in_child=_after_fork_in_child)
