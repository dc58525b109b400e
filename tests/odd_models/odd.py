"""What every odd model is made of: an `Odd`, whose `step(i)` is one turn of its training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Odd:
    """What is trained: `watched` models, `optimizers` as they stand now, and one turn of the loop."""

    watched: list[nn.Module]
    optimizers: list[Optimizer]
    step: Callable[[int], None] = field(default=lambda number: None)
    kept: list[Any] = field(default_factory=list)  # what the loop holds on to


def data(*shape: int) -> Tensor:
    return torch.randn(*shape)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.01, momentum=0.9)


def plain(
    model: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: Optimizer | None = None,
    before: Callable[[Odd, int], None] = lambda odd, number: None,
) -> Odd:
    """The usual loop; `before` runs at the head of every turn and may change anything."""
    odd = Odd([model], [optimizer or sgd(model)])

    def step(number: int) -> None:
        before(odd, number)
        odd.optimizers[0].zero_grad()
        loss().backward()
        odd.optimizers[0].step()

    odd.step = step
    return odd
