"""Removal of most post-accumulate hooks of an optimizer once its steps are alike; the few left count for all.

A hook costs half a microsecond a parameter. Equal versions step after step mean that every gradient starts fresh
(`set_to_none`), so that "there is a gradient of these versions" counts the same as a hook on each. Where it does not,
all hooks are reinstalled, for a while or for good.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.gradient_writes import Reading, State, grown_alike

PRUNE_FROM = 32  # parameters; below this the hooks cost nothing worth saving
STEADY = 5  # identical steps before hooks are removed
KEPT_HOOKS = 4
BACKOFF = 200  # steps before hooks are removed again after they had to be reinstalled
RECHECK = 16  # steps between full comparisons of the optimizer's parameters while most hooks are removed


class HookPruning:
    """The pruning of the hooks on K parameters of one optimizer: learned from its steps, undone where it miscounts."""

    def __init__(self, count: int) -> None:
        self.possible = count >= PRUNE_FROM  # enough parameters for it to pay
        self.pruned = False
        # The versions of the gradients (-1 = none) noted last; the same list while they are the same steps.
        self._pattern: list[int] = []
        self._backwards = 0  # of the pattern
        self._calls: NDArray[np.int32] | None = None  # of the pattern
        self._complete = False
        self._steady = 0
        self._blocked_until = 0
        self._ambiguous = False  # a few hooks cannot tell the last step's gradient from a new one

    # -- learning ----------------------------------------------------------------------------------------

    def note(self, versions: list[int], calls: NDArray[np.int32], backwards: int) -> None:
        """Note the versions of K gradients (-1 = none) at a step, and how often each arrived, as all hooks counted.

        `calls[K]` is the same array while nothing changes.
        """
        again = versions == self._pattern
        if not (again and calls is self._calls and backwards == self._backwards):
            # Whether each arrived in every backward, or in none.
            whole = [backwards if version >= 0 else 0 for version in versions]
            self._calls, self._complete = calls, calls.tolist() == whole  # sync: numpy
        steady = self._complete and backwards > 0 and again
        self._steady = self._steady + 1 if steady else 0
        self._pattern, self._backwards = versions, backwards

    def due(self, step: int) -> bool:
        """True if a few hooks would count the same arrivals as one on every parameter."""
        steady = self._steady >= STEADY and step >= self._blocked_until
        return steady and self.possible and not self.pruned

    def prune(self, count: int = KEPT_HOOKS) -> list[int]:
        """Prune all hooks but those at the positions returned, `count` (2 or more) of those that had a gradient."""
        self.pruned = True
        present = [k for k, version in enumerate(self._pattern) if version >= 0]
        if len(present) <= count:
            return present
        return [present[round(i * (len(present) - 1) / (count - 1))] for i in range(count)]

    def undo(self, step: int) -> None:
        """Note that all hooks are reinstalled, for a while (for good if a few cannot count right)."""
        self.pruned = False
        self._steady = 0
        self._blocked_until = sys.maxsize if self._ambiguous else step + BACKOFF

    # -- while most hooks are removed --------------------------------------------------------------------

    def versions(self, backwards: int) -> list[int]:
        """The versions that so many backwards give: each but the first adds into the gradient in place."""
        short = self._backwards - backwards
        if not short:
            return self._pattern
        return [version - short if version >= 0 else -1 for version in self._pattern]

    def shows_replaced(self, step: int) -> bool:
        """True if a parameter replaced in place needs no looking for: it leaves a gap that the hooks left show."""
        return step % RECHECK != 0

    def count(
        self, versions: list[int], backwards: int, assumed: bool, now: State, before: State | None, late: bool
    ) -> PrunedCount:
        """Arrivals, by the few hooks left, of a window whose gradients had these `versions` when they were read.

        `assumed`: those were taken to be as foreseen, and may have grown since by a clip. `now` and `before` are the
        states at this step and the last; `late`: the norms of `now` are compared by `PrunedCount.recheck`.
        """
        expected = self.versions(backwards)
        found = now[1] if assumed else versions
        right = backwards > 0 and (found == expected or grown_alike(expected, found, assumed))
        counted = PrunedCount(self, self._pattern if right else found, right, now[0], before)
        if not late:
            counted.recheck(now[2])
        return counted

    def miscounted(self) -> None:
        """Remember that some gradient was the last step's."""
        self._ambiguous = True


class PrunedCount:
    """Arrivals of one window by a few hooks: a gradient wherever `versions` are not -1, if that is `right`."""

    __slots__ = ("_before", "_ids", "_pruning", "right", "versions")

    def __init__(
        self,
        pruning: HookPruning,
        versions: list[int],
        right: bool,
        ids: list[int],
        before: State | None,
    ) -> None:
        """`ids[K]` are those of the gradients, `before` the state at the last step."""
        self._pruning = pruning
        self.versions = versions
        self.right = right
        self._ids = ids
        self._before = before

    def recheck(self, now: Reading) -> None:
        """Note if some gradient, read `now`, is the last step's: not cleared and not renewed, so of the same norm."""
        before, self._before = self._before, None
        if not self.right or before is None or not isinstance(before[2], CpuNorms):
            return
        norms = now.norms()
        for k in np.flatnonzero((norms == before[2].norms()) & (norms > 0)).tolist():  # sync: numpy
            if self._ids[k] == before[0][k]:
                self.right = False
                self._pruning.miscounted()
                return
