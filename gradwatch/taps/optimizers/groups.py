"""The parameters of an optimizer, out of its groups."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def params_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Every parameter of these optimizers, in the order of their groups."""
    return [param for each in optimizers for group in each.param_groups for param in group["params"]]
