"""Windows that are judged later, in order: their numbers are still on their way, or nothing about them hurries.

After a backward the caches are cold, and judging a step in Python costs three to four times what it costs right
after another (312 against 84 µs on the wide MLP of the benchmarks). So steps on which a glance saw nothing
unusual, and on which no rule could act, are judged some at a time: the same numbers in the same order, a little
later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gradwatch.records.snapshot import Decision

DEPTH = 4
"""Windows of one optimizer that may be under way from a device; the next one waits for the oldest."""
MOST = 8
"""Calm windows that may wait to be judged together."""
LONGEST = 0.5
"""Seconds that a calm window may wait while steps are taken."""


class Measured(NamedTuple):
    """A window that has been measured: `ready` tells whether `judge` would do without waiting."""

    ready: Callable[[], bool]
    judge: Callable[[], Decision]


class Deferred:
    """The windows of one lane that wait to be judged.

    When each of them is judged depends on the device and on the clock, and so differs between ranks. A window
    that ranks judge together (`Judge.pooled`) must therefore never come here: its `judge` holds a collective.
    """

    __slots__ = ("_since", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Measured] = deque()
        self._since = 0.0

    def add(self, measured: Measured) -> bool:
        """Put a window at the end of the queue; whether enough wait, or the oldest has waited long enough."""
        now = time.monotonic()
        if not self._waiting:
            self._since = now
        self._waiting.append(measured)
        return len(self._waiting) >= MOST or now - self._since >= LONGEST

    def judge_arrived(self) -> None:
        """Judge what has arrived, oldest first, and wait only where more than `DEPTH - 1` would be left."""
        while self._waiting and (len(self._waiting) >= DEPTH or self._waiting[0].ready()):
            self._waiting.popleft().judge()

    def judge_all(self, failed: Callable[[Exception], None]) -> None:
        """Judge everything, waiting for it; a fault in one window does not cost the others."""
        while self._waiting:
            try:
                self._waiting.popleft().judge()
            except Exception as error:
                failed(error)
