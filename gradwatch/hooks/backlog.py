"""Calm steps that wait to be judged together.

After a backward the caches are cold, and judging a step in Python costs ten times what it costs right after
another (155 against 15 µs of the engine alone). So steps on which a glance saw nothing unusual, and on which
no rule could act, are judged a few at a time: the same numbers in the same order, a little later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gradwatch.snapshot import Decision

MOST = 16  # steps
LONGEST = 1.0  # seconds


class Backlog:
    """The judgements of one lane that were put off, oldest first."""

    __slots__ = ("_since", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Callable[[], Decision]] = []
        self._since = 0.0

    def add(self, judge: Callable[[], Decision]) -> None:
        """Put one off."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(judge)

    def due(self) -> bool:
        """Whether there are enough of them, or the oldest has waited long enough."""
        return len(self._waiting) >= MOST or (
            bool(self._waiting) and time.monotonic() - self._since >= LONGEST
        )

    def take(self) -> list[Callable[[], Decision]]:
        """All of them; none wait any longer."""
        taken, self._waiting = self._waiting, []
        return taken
