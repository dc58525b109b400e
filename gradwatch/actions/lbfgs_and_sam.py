"""Optimizers that evaluate their closure several times in one step: LBFGS, and sharpness-aware ones.

One step is one Snapshot, that of its first gradient: the gradient at the weights the step starts from, before
anything moved, and comparable from step to step however many evaluations follow. The later gradients are
looked at for finiteness, and clipped as the `clip:` section says by what it has learned so far (which they add
nothing to); the first that is not finite becomes a Snapshot of its own. A skip is then no longer
a matter of withholding gradients (LBFGS would take zeros for a minimum and stay there): the step runs to its
end, and the whole of it is taken back, weights and, for LBFGS, its state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gradwatch.taps.optimizers.param_groups import params_of


class ClosureCalls:
    """One call of `optimizer.step(closure)`: how often the closure ran, and what was decided.

    `outer` is the step of the same optimizer whose closure has taken this one, and `depth` how many calls of its `step`
    were under way as this one began.
    """

    def __init__(
        self, backup: WeightBackup | None, outer: ClosureCalls | None = None, depth: int = 1
    ) -> None:
        self.outer = outer
        self.depth = depth
        self.count = 0
        self.skipped = False
        self.versions: list[int] = []  # of the weights as the step began, where gradients were there already
        self.later_nonfinite = False  # a later evaluation was not finite: what follows it says nothing new
        # A bound on the first gradient's total, for every evaluation of the step.
        self.max_norm: float | None = None
        self.backup = backup
        self._running: object = None  # the outermost closure that runs

    @property
    def running(self) -> bool:
        """True if a closure of this step runs, or has raised."""
        return self._running is not None

    def begins(self, closure: object) -> bool:
        """True if this closure, which is about to run, runs inside no other one of the step."""
        if self._running is None:
            self._running = closure
        return self._running is closure  # left behind where it raised

    def ends(self, closure: object) -> bool:
        """Count the evaluation, if the closure that has returned ran inside no other one."""
        if self._running is not closure:
            return False
        self._running = None
        self.count += 1
        return True

    def back_up(self, optimizer: Optimizer) -> None:
        """Keep the weights, and LBFGS's state, as they are now, for a skip of the whole step."""
        self.backup = WeightBackup(optimizer)

    def keep_versions(self, versions: list[int]) -> None:
        """Keep the versions of the weights as a step begins that finds gradients there already."""
        self.versions = versions

    def take_versions(self) -> list[int]:
        """The versions that were kept, and keep them no longer."""
        versions, self.versions = self.versions, []
        return versions

    def count_gradients_before(self) -> None:
        """Count the gradients that were there before the first closure as the step's first evaluation."""
        self.count = 1

    def note_decision(self, skipped: bool, max_norm: float | None) -> None:
        """Keep what was decided on the first gradient: the skip of the step, and a bound on the total for all of it."""
        self.skipped, self.max_norm = skipped, max_norm

    def note_nonfinite(self) -> None:
        """Note that a later evaluation was not finite."""
        self.later_nonfinite = True

    @property
    def must_finish(self) -> bool:
        """True if a skip is left to the end of the step: in the midst of it LBFGS must not find zeros."""
        return self.count > 1 and self.backup is not None and self.backup.exact


class WeightBackup:
    """Weights (and LBFGS's state) as they were before a step; `restore` is exact to the bit."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(param, param.detach().clone()) for param in params_of(optimizer)]
        self._state: dict[Any, dict[str, Any]] | None = None
        if isinstance(optimizer, LBFGS):
            self._state = {
                key: {name: _kept(value) for name, value in entry.items()}
                for key, entry in optimizer.state.items()
            }

    @property
    def exact(self) -> bool:
        """True if the optimizer's state is remembered too, not only the weights."""
        return self._state is not None

    def restore(self) -> None:
        """Put the weights and the optimizer's state back."""
        with torch.no_grad():
            for param, before in self._weights:
                param.copy_(before)
        if self._state is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)


def evaluates_often(optimizer: Optimizer) -> bool:
    """True if a step may call its closure more than once: LBFGS, and whatever is not torch's own."""
    return isinstance(optimizer, LBFGS) or not type(optimizer).step.__module__.startswith("torch.optim")


def may_climb_first(optimizer: Optimizer) -> bool:
    """True if a step may climb by the gradient that it finds, before it calls its closure: what is not torch's own."""
    return not type(optimizer).step.__module__.startswith("torch.optim")


def _kept(value: Any) -> Any:
    """A copy where LBFGS writes in place: lists grow, `prev_flat_grad` is copied into; the rest is replaced."""
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
