"""Windows whose numbers are still on their way from a device, judged in order, as soon as they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gradwatch.snapshot import Decision

DEPTH = 4
"""Windows of one optimizer that may be under way; the next one waits for the oldest, so verdicts stay recent."""


class Measured(NamedTuple):
    """A window that has been measured: `ready` tells whether `judge` would do without waiting."""

    ready: Callable[[], bool]
    judge: Callable[[], Decision]


class Deferred:
    """The windows of one lane that wait to be judged.

    When each of them is judged depends on the device, and so differs between ranks: what ranks do together
    (a collective) belongs where a window is measured, never in its `judge`.
    """

    def __init__(self) -> None:
        self._waiting: deque[Measured] = deque()

    def add(self, measured: Measured) -> None:
        """Put a window at the end of the queue."""
        self._waiting.append(measured)

    def judge_arrived(self) -> None:
        """Judge what has arrived, oldest first, and wait only where more than `DEPTH - 1` would be left."""
        while self._waiting and (len(self._waiting) >= DEPTH or self._waiting[0].ready()):
            self._waiting.popleft().judge()

    def judge_all(self) -> None:
        """Judge everything, waiting for it."""
        while self._waiting:
            self._waiting.popleft().judge()
