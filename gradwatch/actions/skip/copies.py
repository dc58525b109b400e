"""What a step of an optimizer may change beside the gradients: copied, put back, and how it is reached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.taps.optimizers.inner import DEPTH, TORCHS, contained

COUNTED_BY_TORCH = frozenset({"_step_count"})  # LR schedulers look at it: a skipped step was called


class Copy:
    """What a step may change beside the gradients; `whole` with the weights and the state of each parameter."""

    def __init__(self, optimizer: Optimizer, whole: bool) -> None:
        self._optimizer = optimizer
        self._weights = [(param, param.detach().clone()) for param in params_of(optimizer)] if whole else []
        self._groups = [
            (group, {key: copied(value) for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]
        self._known = set(optimizer.state)
        state = optimizer.state.items()
        self._own = {key: copied(entry) for key, entry in state if not isinstance(key, Tensor)}
        self._of_params = {key: copied(entry) for key, entry in state if whole and isinstance(key, Tensor)}
        self._counts = {
            name: value
            for name, value in vars(optimizer).items()
            if type(value) in (bool, int, float) and name not in COUNTED_BY_TORCH
        }

    def moved(self) -> bool:
        """Whether a weight is no longer what it was, or not a number."""
        return not all(torch.equal(param.detach(), before) for param, before in self._weights)

    @torch.no_grad()
    def restore(self, of_params: bool = True) -> None:
        """Put everything back, to the bit; `of_params` False: all but the weights and the state of each."""
        for group, rest in self._groups:
            group.update(rest)
        state = self._optimizer.state
        for key in set(state) - self._known:
            del state[key]
        state.update(self._own)
        vars(self._optimizer).update(self._counts)
        if of_params:
            for param, before in self._weights:
                param.copy_(before)
            state.update(self._of_params)


def keeps_own_lists(optimizer: Optimizer) -> bool:
    """Whether an optimizer reaches parameters by another way than `group["params"]`."""
    mine = set(map(id, params_of(optimizer)))
    own = [value for name, value in vars(optimizer).items() if name not in TORCHS]
    own += [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return any(_reaches(value, mine, optimizer.param_groups, DEPTH) for value in own)


def _reaches(value: Any, mine: set[int], groups: list[dict[str, Any]], depth: int) -> bool:
    if isinstance(value, Tensor):
        return id(value) in mine
    if isinstance(value, Optimizer):
        emptied = set(map(id, groups))
        return not all(id(group) in emptied for group in value.param_groups)
    return depth > 0 and any(_reaches(each, mine, groups, depth - 1) for each in contained(value))


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def copied(value: Any) -> Any:
    """A copy of what a step may write to in place: tensors and plain containers of them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value
