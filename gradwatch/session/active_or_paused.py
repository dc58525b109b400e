"""Activity of a session: active, paused after three internal errors in a row, or closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gradwatch.errors import TrainingStopped
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.process_identity import here

FAILURES = 3  # internal errors in a row before watching pauses
PAUSE_SECONDS = 60.0
STEP_PATH = ("capture", "boundary", "engine")  # a broken tap must not blind the rest


class Activity:
    """The state of one session: attached or not, paused or not, in which process and on which thread it steps.

    It serves the process `pid`, 0 for none. `thread` takes the steps, None = not known. `resumed` is called when a
    pause has ended. Three internal errors in a row on the step path pause it for a minute.
    """

    def __init__(self, health: Health, strict: bool, resumed: Callable[[], None]) -> None:
        self.health = health
        self.pauses = 0
        self._strict = strict
        self._resumed = resumed
        # None before every part is there: another thread may train while this one attaches.
        self.pid = 0
        self._failures = 0
        self.paused_until = 0.0
        self.thread: int | None = None

    def begin(self, pid: int) -> None:
        """Begin: everything is attached, in this process."""
        self.pid = pid

    def steps_here(self) -> None:
        """Note that the present thread takes a step."""
        self.thread = threading.get_ident()

    def end(self) -> None:
        """End: nothing is watched any more."""
        self.pid = 0

    @property
    def serving(self) -> bool:
        """Attached, not closed, and no forked child; true in a pause too."""
        return here[0] == self.pid

    def idle(self) -> bool:
        """True if nothing is watched now: closed, not attached yet, a forked child, a pause after internal errors."""
        return here[0] != self.pid or (self.paused_until > 0 and self.paused())

    def paused(self) -> bool:
        """True if internal errors have switched the step path off; at the end of a pause it starts afresh."""
        if not self.paused_until:
            return False
        if time.monotonic() < self.paused_until:
            return True
        self.paused_until = 0.0
        self._resumed()
        for component in STEP_PATH:
            self.health.mark(component, True)
        return False

    def failed(self, component: str, error: BaseException) -> None:
        """Count an internal error. Raises it if `strict`, and always what a signal handler of the script raised."""
        if isinstance(error, TrainingStopped):
            raise error
        self.health.report(component, error)
        if component in STEP_PATH:
            self._failures += 1
        if self._failures >= FAILURES:
            self.paused_until = time.monotonic() + PAUSE_SECONDS
            self._failures = 0
            self.pauses += 1
            self.health.mark(component, False)
        if self._strict:
            raise error

    def judged(self) -> None:
        """Note that a step was judged without an internal error."""
        self._failures = 0

    def is_step_thread(self) -> bool:
        """True if this is the thread that takes the steps, as far as one has been seen, or that thread has ended."""
        if self.thread in (None, threading.get_ident()):
            return True
        return all(thread.ident != self.thread for thread in threading.enumerate())
