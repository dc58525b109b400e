"""Pattern of a training loop: how many backwards make a step, and how gradients look then.

Until the number of backwards (N) has been equal for three steps, and for a hundred after it varied, every
backward is read, because the last (partial) window of an epoch would otherwise be seen only after the user's
clipping. Equal versions step after step mean that every gradient starts fresh (`set_to_none`), so that "there
is a gradient" counts the same as a hook, and most hooks can go.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

LEARNED = 3  # equal counts of backwards before a loop is believed
VARIED = 100  # steps after a change of that count during which every backward is read
STEADY = 5  # identical steps before hooks are removed
BACKOFF = 200  # steps before thinning is tried again after it had to be undone


class AccumulationSchedule:
    """Accumulation pattern of one optimizer; `expected` backwards a step (None = no step seen yet)."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self._equal = 0
        self._varied = -VARIED
        self.pattern: list[int] = []  # the versions noted last; the same list while they are the same steps
        self._pattern_backwards = 0
        self._calls: NDArray[np.int32] | None = None  # of the pattern
        self._complete = False
        self._steady = 0
        self._blocked_until = 0

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

    def note(self, versions: list[int], calls: NDArray[np.int32], backwards: int) -> None:
        """The versions of K gradients (-1 = none) at a step, and how often each arrived.

        `calls[K]` is the same array while nothing changes.
        """
        again = versions == self.pattern
        if not (again and calls is self._calls and backwards == self._pattern_backwards):
            # Whether each arrived in every backward, or in none.
            whole = [backwards if version >= 0 else 0 for version in versions]
            self._calls, self._complete = calls, calls.tolist() == whole  # sync: numpy
        steady = self._complete and backwards > 0 and again
        self._steady = self._steady + 1 if steady else 0
        self.pattern, self._pattern_backwards = versions, backwards

    def versions(self, backwards: int) -> list[int]:
        """The versions that so many backwards give: each but the first adds into the gradient in place."""
        short = self._pattern_backwards - backwards
        if not short:
            return self.pattern
        return [version - short if version >= 0 else -1 for version in self.pattern]

    def steady(self, step: int) -> bool:
        """True if a few hooks would count the same arrivals as one on every parameter."""
        return self._steady >= STEADY and step >= self._blocked_until

    def spread(self, count: int) -> list[int]:
        """`count` positions (2 or more), or all, spread evenly over those that received a gradient in the last step."""
        present = [k for k, version in enumerate(self.pattern) if version >= 0]
        if len(present) <= count:
            return present
        return [present[round(i * (len(present) - 1) / (count - 1))] for i in range(count)]

    def block(self, step: int, for_good: bool) -> None:
        """A few hooks miscounted: keep them all for a while, or for good."""
        self._steady = 0
        self._blocked_until = sys.maxsize if for_good else step + BACKOFF
