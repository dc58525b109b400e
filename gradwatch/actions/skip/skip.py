"""Keeping a step from an optimizer, exactly: parameters and optimizer state stay bit-identical.

torch's own optimizers pass over a parameter whose gradient is None. Others may not check for that, and may keep what
they like where they like: they take their step, and it is taken back (`actions.skip.backup`). That costs, at a skipped
step only, memory for the weights, the gradients and whatever the optimizer holds once more. They find zeros for
gradients, for what is skipped may not be finite, and their step must not raise for it; one that wraps another
finds the gradients, for the steps of the other one are watched.

No other step hook sees any of this: the gradients go after the last of their pre-hooks has run, and are
back before the first of their post-hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.actions.skip.backup import OptimizerBackup
from gradwatch.runtime import guard
from gradwatch.taps import step_hooks
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.optimizers.param_groups import params_of
from gradwatch.taps.optimizers.wrapped_optimizers import with_inner


class StepSkipper:
    """One step of one optimizer, skipped."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._grads: list[
            tuple[Tensor, Tensor | None, Tensor | None]
        ] = []  # parameter, its gradient, in its place
        self._backup: OptimizerBackup | None = None
        self._handles: list[RemovableHandle] = []
        self._began = False

    def begin(self, at_once: bool) -> None:
        """Let the step under way change nothing; `at_once`: its pre-hooks have all run, in its closure."""
        # Where the wrapper of the step is not on the stack, it is compiled and may not look up its hooks anew.
        if at_once or step_hooks.steps_under_way(self.optimizer) != 1:
            self.skip_step()
        else:
            self.after_other_hooks()

    def after_other_hooks(self) -> None:
        """Skip the step once all other pre-hooks have run; restore before their post-hooks do."""

        def last(*_: Any) -> None:
            try:
                self.skip_step()
            except Exception as error:
                guard.fault("action", error)

        def first(*_: Any) -> None:
            try:
                if step_hooks.steps_under_way(self.optimizer) == 1:  # not at the end of its `super().step()`
                    self.restore(True)
            except Exception as error:
                guard.fault("action", error)

        with own_ids:
            self._handles.append(self.optimizer.register_step_pre_hook(last))
            after = self.optimizer.register_step_post_hook(first)
            self._handles.append(after)
        hooks: Any = self.optimizer._optimizer_step_post_hooks
        with contextlib.suppress(KeyError, AttributeError):  # else the end of the boundary restores it
            hooks.move_to_end(after.id, last=False)

    def skip_step(self) -> None:
        """Begin, once: the hooks of a subclass that calls `super().step()` run twice."""
        if self._began:
            return
        self._began = True
        params, all_optimizers = params_of(self.optimizer), with_inner(self.optimizer)
        if is_torchs(self.optimizer):
            self._replace_gradients(params, [None] * len(params))
        elif len(all_optimizers) > 1:
            grads = [param.grad for param in params_of(*all_optimizers) if param.grad is not None]
            self._backup = OptimizerBackup(self.optimizer, grads)
        else:
            zeros = [None if param.grad is None else torch.zeros_like(param.grad) for param in params]
            self._backup = OptimizerBackup(self.optimizer)
            self._replace_gradients(params, zeros)

    def _replace_gradients(self, params: Sequence[Tensor], instead: list[Tensor | None]) -> None:
        self._grads = [(param, param.grad, other) for param, other in zip(params, instead, strict=True)]
        for param, _, other in self._grads:
            param.grad = other

    def restore(self, finished: bool) -> None:
        """Put everything back; a second call does nothing. A step that raised (not `finished`) is left as it is."""
        backup, self._backup = self._backup, None
        grads, self._grads = self._grads, []
        if not finished:  # who knows what was done since
            return
        if backup is not None:
            backup.restore()
        for param, grad, instead in grads:
            if param.grad is instead:  # no newer backward has made one
                param.grad = grad

    def release(self) -> None:
        """Remove the hooks; not while torch walks over the optimizer's own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def is_torchs(optimizer: Optimizer) -> bool:
    """True if its step is torch's own, inherited or not: one that passes over parameters without a gradient."""
    return type(optimizer).step.__module__.startswith(("torch.optim", "torch.distributed.optim"))
