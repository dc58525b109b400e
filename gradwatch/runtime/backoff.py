"""Backoff: the time to retry what has failed."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """The pause after failures in a row: `first` seconds, twice as long after each further one, `longest` at most.

    `until` is the moment of `clock` before which it is too early; 0 while nothing has failed.
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.until = 0.0
        self._first, self._longest, self._clock = first, longest, clock
        self._pause = 0.0

    @property
    def failing(self) -> bool:
        """True if the last attempt failed."""
        return self._pause > 0

    @property
    def ready(self) -> bool:
        """True if it may be tried now."""
        return self._clock() >= self.until

    def failed(self) -> float:
        """Note a failure; returns the seconds to wait."""
        self._pause = min(max(self._first, 2 * self._pause), self._longest)
        self.until = self._clock() + self._pause
        return self._pause

    def succeeded(self) -> None:
        """Start over: it may be tried at once."""
        self._pause = self.until = 0.0
