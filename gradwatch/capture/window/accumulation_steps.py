"""Number of backwards that make a step of a training loop, learned step after step.

Until that number has been equal for three steps, and for a hundred after it varied, every backward is read, because
the last (partial) window of an epoch would otherwise be seen only after the user's clipping.
"""

from __future__ import annotations

LEARNED = 3  # equal counts of backwards before a loop counts as learned
VARIED = 100  # steps after a change of that count during which every backward is read


class AccumulationSchedule:
    """Accumulation pattern of one optimizer; `expected` backwards a step (None = no step seen yet).

    A step may follow after `may_end_from` backwards, 1 or more.
    """

    def __init__(self) -> None:
        self.expected: int | None = None
        self.may_end_from = 1
        self._equal = 0
        self._varied = -VARIED

    def count(self, step: int, backwards: int) -> None:
        """Count a step that came after so many backwards."""
        if backwards == self.expected:
            self._equal += 1
        else:
            if self.expected is not None:
                self._varied = step
            self.expected, self._equal = backwards, 1
        learned = self._equal >= LEARNED and step + 1 - self._varied >= VARIED
        self.may_end_from = max(1, self.expected) if learned else 1
