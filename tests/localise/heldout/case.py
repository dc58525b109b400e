"""The format of a held-out case: a small training that goes wrong at one step, and what is at fault.

A case is a function that trains, like a script, and calls `watch(model, optimizer)` once where a user would. The line
at fault carries the comment `# FAULT` (more than one: any of them is right).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

T = 5  # the step at fault, counted from 0
STEPS = 8
LOSS = "<loss>"  # the module of a fault in the loss function, outside of every module
DATA = "<data>"  # the module of a fault that came in with the batch

Watch = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """What is at fault in `train`: `modules` and `ops` list every right answer, `places` are (file, line)."""

    train: Callable[[Watch], None]
    modules: tuple[str, ...]
    ops: tuple[str, ...]  # empty: no operation is asked for
    places: frozenset[tuple[str, int]]  # empty: no line is asked for
    symptom: str = "nonfinite"

    @property
    def name(self) -> str:
        """The name of the training."""
        return self.train.__name__

    @property
    def finite(self) -> bool:
        """Whether gradients only grow or fade."""
        return self.symptom in ("exploding", "overflow", "vanishing")


CASES: list[Case] = []


def case(
    module: str | Sequence[str],
    op: str = "",
    where: Callable[..., Any] | None = None,
    symptom: str = "nonfinite",
) -> Callable[[Callable[[Watch], None]], Callable[[Watch], None]]:
    """Register a training: faulty `module`, operations `op` (blank-separated), lines marked in `where` (or itself)."""

    def register(train: Callable[[Watch], None]) -> Callable[[Watch], None]:
        modules = (module,) if isinstance(module, str) else tuple(module)
        CASES.append(Case(train, modules, tuple(op.split()), frozenset(_marked(where or train)), symptom))
        return train

    return register


def _marked(function: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    lines, first = inspect.getsourcelines(function)
    for offset, line in enumerate(lines):
        if "# FAULT" in line:
            yield inspect.getsourcefile(function) or "", first + offset


def batches(
    spoil: Callable[[Tensor], None] | None = None,
    shape: tuple[int, ...] = (8, 6),
    steps: int = STEPS,
    at: int = T,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (step, batch); the batch of step `at` is spoilt in place."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    for step in range(steps):
        x = torch.randn(shape, generator=generator)
        if step == at and spoil is not None:
            spoil(x)
        yield step, x


def fit(
    watch: Watch,
    model: nn.Module,
    data: Iterator[tuple[int, Tensor]],
    each: Callable[[int], None] | None = None,
) -> None:
    """Train `model` the plain way; `each` is told of every step before it (a schedule, say)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for step, x in data:
        if each is not None:
            each(step)
        optimizer.zero_grad()
        loss = (model(x) - 0.5).square().mean()
        loss.backward()
        optimizer.step()


def zero_row(x: Tensor) -> None:
    """Make the third sample nothing but zeros."""
    x[2] = 0.0
