"""Steps that are judged later, in order: their numbers are still on their way, or nothing about them is urgent.

After a backward the caches are cold, and judging a step in Python costs three to four times what it costs right
after another (312 against 84 µs on the wide MLP of the benchmarks). So steps on which a quick look saw nothing
unusual, and on which no rule could act, are judged some at a time: the same numbers in the same order, a little
later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

DEPTH = 4
"""Steps of one optimizer that may be under way from a device; the next one waits for the oldest."""
MOST = 8
"""Calm steps that may wait to be judged together."""
LONGEST = 0.5
"""Seconds that an ordinary step may wait while steps are taken."""


class Deferred(NamedTuple):
    """A step that has been measured: `ready` tells whether `conclude`, which judges and publishes it, would wait."""

    ready: Callable[[], bool]
    conclude: Callable[[], object]


class Deferral:
    """The steps of one optimizer that wait to be judged.

    When each of them is judged depends on the device and on the clock, and so differs between ranks. A step that ranks
    judge together (`OptimizerContext.pooled`) must therefore never come here: its `conclude` holds a collective.
    """

    __slots__ = ("_since", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Deferred] | None = (
            None  # most optimizers of a loop that makes many never need one
        )
        self._since = 0.0

    def submit(self, step: Deferred) -> bool:
        """Put a step at the end of the queue; whether enough wait, or the oldest has waited long enough."""
        now = time.monotonic()
        if self._waiting is None:
            self._waiting = deque()
        if not self._waiting:
            self._since = now
        self._waiting.append(step)
        return len(self._waiting) >= MOST or now - self._since >= LONGEST

    def flush_ready(self, depth: int = DEPTH) -> None:
        """Judge what has arrived, oldest first, and wait only where more than `depth - 1` would be left."""
        while self._waiting and (len(self._waiting) >= depth or self._waiting[0].ready()):
            self._waiting.popleft().conclude()

    def flush(self, failed: Callable[[Exception], None]) -> None:
        """Judge everything, waiting for it; a failure in one step does not cost the others."""
        while self._waiting:
            try:
                self._waiting.popleft().conclude()
            except Exception as error:
                failed(error)
