"""What every situation is made of: a `Training`, whose `step(i)` is one turn of its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.situations.probe import Loop

YOUNG, LEARNED = 3, 10
"""Turns before which a loop changes: before its marks are thinned, and after."""
STEPS = 12


@dataclass
class Training:
    """What is trained: `models` to be watched, `optimizers` as they stand now, and one turn of the loop.

    A turn goes through `loop`: its `backward` and `step` are torch's, until a test sets a Probe there.
    """

    models: list[nn.Module]
    optimizers: list[Optimizer]
    step: Callable[[int], None] = field(default=lambda number: None)
    kept: list[Any] = field(default_factory=list)  # what the loop holds on to
    loop: Loop = field(default_factory=Loop)


Change = Callable[[Training, int], None]


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 6)))


LARGE, SMALL = 16, 5
_layers = [LARGE]


@contextmanager
def small() -> Iterator[None]:
    """Nets made within have a few layers only."""
    _layers[0] = SMALL
    try:
        yield
    finally:
        _layers[0] = LARGE


def net(layers: int = 0, size: int = 6) -> nn.Sequential:
    """Enough parameters for the marks to be thinned once the loop is learned, unless `small`."""
    parts: list[nn.Module] = []
    for _ in range(layers or _layers[0]):
        parts += [nn.Linear(size, size), nn.Tanh()]
    return nn.Sequential(*parts)


def sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.01, momentum=0.9)


def square(out: Tensor) -> Tensor:
    """A loss."""
    return out.pow(2).sum()


def plain(
    model: nn.Module,
    loss: Callable[[], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    change: Change = lambda training, number: None,
    clip: bool = True,
) -> Training:
    """One backward, clipping, one step; `change` runs at the head of every turn and may change anything."""
    training = Training([model], [optimizer or sgd(model)])
    loss = loss or (lambda: square(model(data())))

    def step(number: int) -> None:
        change(training, number)
        model.zero_grad()
        training.optimizers[0].zero_grad()
        training.loop.backward(loss())
        training.loop.step(training.optimizers[0], clip)

    training.step = step
    return training


def turns(
    model: nn.Module, turn: Callable[[Training, int], None], optimizer: Optimizer | None = None
) -> Training:
    """A loop whose turns, less the clearing of gradients, are written by hand."""
    training = Training([model], [optimizer or sgd(model)])

    def step(number: int) -> None:
        training.optimizers[0].zero_grad()
        turn(training, number)

    training.step = step
    return training


def changing(change: Callable[[nn.Sequential, Training], Any]) -> Callable[[], Training]:
    """The usual loop, changed while it is young and again when it is learned."""

    def make() -> Training:
        model = net()
        return plain(
            model, change=lambda training, number: number in (YOUNG, LEARNED) and change(model, training)
        )

    return make
