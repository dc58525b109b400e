"""The one optimizer of a process in whose steps faults are injected."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

PATIENCE = 25
"""Steps that another optimizer may take with none of the followed one between, as critics do."""


class FollowedOptimizer:
    """The first optimizer that steps; another one takes its place where it is gone, or has stopped.

    `steps` are those of the present one, `most` and `total` those of each so far. `changes` counts the times that
    another one took the place.
    """

    def __init__(self) -> None:
        self._ref: weakref.ref[Optimizer] | None = None
        self._others: dict[int, int] = {}  # steps since the last one of the followed optimizer, by id
        self.steps = self.most = self.total = self.changes = 0

    def steps_of(self, optimizer: Optimizer) -> bool:
        """True if a step of this optimizer, which was taken or rejected just now, is one of the followed one's."""
        followed = None if self._ref is None else self._ref()
        if followed is not None and followed is not optimizer:
            count = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
            if count <= PATIENCE:
                return False
        self._others.clear()
        if followed is not optimizer:
            self.changes += self._ref is not None
            self._ref, self.steps = weakref.ref(optimizer), 0
        return True

    def count(self) -> None:
        """Count a step of the followed optimizer that was taken."""
        self.steps += 1
        self.total += 1
        self.most = max(self.most, self.steps)
