"""Slow work done beside the training: a few jobs, one after another, in a thread that lives only while there are any.

Not the journal's thread, whose next event must be durable within milliseconds however large a bundle is; and not one
of its own for good, for bundles are rare.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

MOST = 2
"""Jobs that wait or run at a time; each holds the tensors of a bundle."""


class Background:
    """Runs what `submit` takes; `failed` gets what a job raises. In a forked child it does nothing."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._pid = os.getpid()
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._running = False

    def submit(self, job: Callable[[], object]) -> bool:
        """Take a job over; False where as many are waiting as may. Never waits for one."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            if len(self._jobs) + self._running >= MOST:
                return False
            self._jobs.append(job)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="gradwatch-bundle", daemon=True).start()
        return True

    def wait(self, timeout: float) -> bool:
        """Wait for everything taken over, at most `timeout` seconds from now."""
        if os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._running

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:
                self._failed(error)
            del job  # it holds the tensors of a bundle

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            if self._jobs:
                return self._jobs.popleft()
            self._running = False
            self._changed.notify_all()
            return None
