"""Number of backwards that make a step of a training loop, learned step after step.

Until that number has been equal for three steps, and for a hundred after it varied, every backward is read, because
the last (partial) window of an epoch would otherwise be seen only after the user's clipping.
"""

from __future__ import annotations

LEARNED = 3  # equal counts of backwards before a loop is believed
VARIED = 100  # steps after a change of that count during which every backward is read


class AccumulationSchedule:
    """Accumulation pattern of one optimizer; `expected` backwards a step (None = no step seen yet)."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self._equal = 0
        self._varied = -VARIED

    def may_end(self, step: int, backwards: int) -> bool:
        """True if a step may follow after so many backwards."""
        if self.expected is None or self._equal < LEARNED or step - self._varied < VARIED:
            return True
        return backwards >= self.expected

    def count(self, step: int, backwards: int) -> None:
        """A step came after so many backwards."""
        if backwards == self.expected:
            self._equal += 1
            return
        if self.expected is not None:
            self._varied = step
        self.expected, self._equal = backwards, 1
