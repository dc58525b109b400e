"""Keeping a step from an optimizer, exactly: parameters and optimizer state stay bit-identical.

torch's own optimizers pass over a parameter whose gradient is None. Others may not check for that, and may keep
what they like where they like, so a deep copy takes the step in their place (`actions.skip.shadow_optimizer`). That
costs, at a skipped step only, memory for whatever the optimizer holds (weights, gradients, state, attributes) once
more, and twice the weights and the state while it is tried.

Where that cannot be (a closure has the gradients made inside the step; a compiled step keeps its arguments; a copy
fails), the step finds empty parameter lists, and what it counts or keeps beside them (in groups, in entries of
`state` that belong to no parameter) is put back. An optimizer that reaches its parameters by another way (LBFGS's
`_params`, one that wraps another), or that cannot do with empty lists (`actions.skip.empty_groups`: tried before the
first), takes its step, which is then taken back from copies. Tensors in attributes are not put back there.

No other step hook sees any of this: the gradients go after the last of their pre-hooks has run, and are
back before the first of their post-hooks. Only a global hook that is called for the `super().step()` of an
optimizer of other people finds the stand-in there, and arguments that name it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.actions.skip.copies import Copy, keeps_own_lists
from gradwatch.actions.skip.shadow_optimizer import RandomNumbers, stand_in_for
from gradwatch.runtime import guard
from gradwatch.taps import step_hooks
from gradwatch.taps.optimizers.inner import with_inner


class StepSkipper:
    """One step of one optimizer, withheld; `may_empty`: whether its step can do with empty parameter lists."""

    def __init__(self, optimizer: Optimizer, may_empty: Callable[[], bool]) -> None:
        self.optimizer = optimizer
        self._may_empty = may_empty
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self._lists: list[tuple[dict[str, Any], list[Any]]] = []
        self._copies: list[Copy] = []
        self._handles: list[RemovableHandle] = []
        self._random: RandomNumbers | None = None
        self._began = False

    @property
    def emptied(self) -> bool:
        """Whether its parameter lists are empty."""
        return bool(self._lists)

    def begin(self, at_once: bool) -> None:
        """Let the step under way find nothing to do; `at_once`: its pre-hooks have all run, in its closure."""
        # Where the wrapper of the step is not on the stack, it is compiled and may not look up its hooks anew.
        if at_once or step_hooks.steps_under_way(self.optimizer) != 1:
            self.skip_step()
        else:
            self.after_other_hooks()

    def after_other_hooks(self) -> None:
        """Withhold the step once everybody else's pre-hooks have run; give back before their post-hooks do."""

        def last(_: Optimizer, args: Any, kwargs: Any) -> Any:
            try:
                return self.skip_step((args, kwargs))
            except Exception as error:
                guard.fault("action", error)
                return None

        def first(*_: Any) -> None:
            try:
                if step_hooks.steps_under_way(self.optimizer) == 1:  # not at the end of its `super().step()`
                    self.give_back(True)
            except Exception as error:
                guard.fault("action", error)

        self._handles.append(self.optimizer.register_step_pre_hook(last))
        after = self.optimizer.register_step_post_hook(first)
        self._handles.append(after)
        hooks: Any = self.optimizer._optimizer_step_post_hooks
        with contextlib.suppress(KeyError, AttributeError):  # else the end of the boundary gives back
            hooks.move_to_end(after.id, last=False)

    def skip_step(self, call: tuple[Any, Any] | None = None) -> tuple[Any, Any] | None:
        """Begin, once: the hooks of a subclass that calls `super().step()` run twice.

        `call`: args and kwargs of the step, where they may still be replaced; returned: what replaces them.
        """
        if self._began:
            return None
        self._began = True
        optimizer = self.optimizer
        groups = optimizer.param_groups
        if is_torchs(optimizer):
            self._grads = [(param, param.grad) for group in groups for param in group["params"]]
            for param, _ in self._grads:
                param.grad = None
        elif call is not None and (stand_in := self._stand_in(*call)) is not None:
            return (stand_in, *call[0][1:]), call[1]
        elif keeps_own_lists(optimizer) or not self._may_empty():
            self._copies = [Copy(each, whole=True) for each in with_inner(optimizer)]
        else:
            self._copies = [Copy(optimizer, whole=False)]
            self._lists = [(group, group["params"]) for group in groups]
            for group in groups:
                group["params"] = []
        return None

    def _stand_in(self, args: Any, kwargs: Any) -> Optimizer | None:
        found = stand_in_for(self.optimizer, args, kwargs, {handle.id for handle in self._handles})
        if found is not None:
            self._random = RandomNumbers(self.optimizer)
        return found

    def give_back(self, finished: bool) -> None:
        """Put everything back; a second call does nothing."""
        for group, params in self._lists:
            group["params"] = params
        for copy in self._copies if finished else ():  # of a step that raised, who knows what was done since
            copy.restore()
        if finished and self._random is not None:
            self._random.restore()
        if finished:
            for param, grad in self._grads:
                if param.grad is None:
                    param.grad = grad
        self._lists, self._copies, self._grads, self._random = [], [], [], None

    def let_go(self) -> None:
        """Remove the hooks; not while torch walks over the optimizer's own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether its step is torch's own, inherited or not: one that passes over parameters without a gradient."""
    return type(optimizer).step.__module__.startswith(("torch.optim", "torch.distributed.optim"))
