"""The parameters of an optimizer, out of its groups."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def params_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Every parameter of these optimizers, in the order of their groups."""
    found: list[nn.Parameter] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += group["params"]
    return found
