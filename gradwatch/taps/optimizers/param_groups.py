"""The parameters of an optimizer, out of its groups."""

from __future__ import annotations

import gc

from torch import nn
from torch.optim import Optimizer


def params_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Every parameter of these optimizers, in the order of their groups."""
    found: list[nn.Parameter] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += group["params"]
    return found


def in_any_optimizer() -> frozenset[int]:
    """The `id` of every parameter that some optimizer of this process has, whether it has ever stepped or not.

    Looks at all objects of the process (some 0.1 s for a million): for what is asked once in a run.
    """
    return frozenset(
        id(param)
        for one in gc.get_objects()
        if issubclass(type(one), Optimizer)  # asks nothing of the objects themselves
        for group in vars(one).get("param_groups", ())
        for param in group.get("params", ())
    )
