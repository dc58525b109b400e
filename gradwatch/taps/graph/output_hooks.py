"""A hook on the gradient of a tensor that torch has just computed, put there in fewer calls than torch needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradwatch.taps.hook_ids import own_ids

_OURS = -1  # torch numbers its own hooks from 0 on


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Hook a tensor that autograd computed, as `tensor.register_hook(hook)`, for good.

    The first hook of a plain tensor is put where torch would put it; what is saved is the handle to remove it by.
    """
    register: Any = getattr(tensor.grad_fn, "_register_hook_dict", None)
    if register is None or type(tensor) is not Tensor or tensor._backward_hooks is not None:
        with own_ids:
            tensor.register_hook(hook)
        return
    # Later hooks are added to this dict by torch, which refers to it weakly: a plain dict would not do.
    tensor._backward_hooks = hooks = OrderedDict()
    register(tensor)
    hooks[_OURS] = hook
