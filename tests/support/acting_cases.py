"""A small training that can be hurt at will, watched by rules in a text: shared by the tests of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.records.decision import Order
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

WARM = 30
"""Steps after which every baseline with `warmup: 20` judges."""


class Training:
    """A model whose gradients follow a script: `scale` multiplies the gradient of each parameter named."""

    def __init__(self, seed: int = 0, kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.scale: dict[str, float] = {}
        for name, param in self.model.named_parameters():
            param.register_hook(lambda grad, name=name: self._spoilt(grad, name))
        self.steps = 0

    def _spoilt(self, grad: Tensor, name: str) -> Tensor | None:
        factor = self.scale.get(name, self.scale.get("*"))
        if factor is None:
            return None
        if math.isfinite(factor):
            return grad * factor
        grad = grad.clone()
        grad.view(-1)[0] = factor
        return grad

    def backward(self, **scale: float) -> None:
        """One backward; `scale` by parameter, dots written as `__`, "all" for each of them."""
        self.scale = {key.replace("__", ".").replace("all", "*"): value for key, value in scale.items()}
        x = torch.randn(16, 6, generator=self.generator)
        y = torch.randn(16, 3, generator=self.generator)
        self.optimizer.zero_grad()
        (self.model(x) - y).square().mean().backward()

    def step(self, **scale: float) -> None:
        """One training step."""
        self.backward(**scale)
        self.optimizer.step()
        self.steps += 1

    def warm_up(self, steps: int = WARM) -> None:
        """Healthy steps."""
        for _ in range(steps):
            self.step()

    def weights(self) -> list[Tensor]:
        """Copies of every parameter."""
        return [param.detach().clone() for param in self.model.parameters()]

    def norms(self) -> dict[str, float]:
        """The norm of every present gradient in float64, by name."""
        return {
            name: float(param.grad.double().norm())
            for name, param in self.model.named_parameters()
            if param.grad is not None
        }


@contextmanager
def watched(training: Training, text: str, **keys: Any) -> Iterator[tuple[gradwatch.Watch, Kept]]:
    """A watch by the rules in a text, strict unless told otherwise."""
    kept = Kept()
    options = {"sinks": [kept], "strict": True, **keys}
    with gradwatch.watch(
        training.model, training.optimizer, rules=parse_rules(f"version: 1\n{text}"), **options
    ) as gw:
        yield gw, kept


def orders(record: Record) -> dict[str, Order]:
    """What was ordered on a step, by action."""
    return {order.action: order for order in record.decision.orders}


def kinds(kept: Kept, rule: str = "r") -> list[tuple[int, str]]:
    """(step, kind) of every event of a rule."""
    return [
        (event.step, event.kind)
        for record in kept.records
        for event in record.verdict.events
        if event.rule == rule
    ]


def run_folder(path: Path) -> dict[str, Any]:
    """Options for a watch that writes a journal under `path` and nothing else."""
    from gradwatch.sinks.journal import JournalSink

    return {"sinks": [JournalSink()], "run_dir": path, "run_id": "r"}
