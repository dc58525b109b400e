"""Mixed-precision training loops as people write them, watched or not, and what they ought to be seen as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import gradwatch
from gradwatch.records.event import Event
from gradwatch.records.record import Record
from tests.support.kept import Kept

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(11))


def net(seed: int = 0) -> nn.Sequential:
    """A small float32 model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def watched(model: Any, optimizer: Any, rules: Any = "default", **keys: Any) -> tuple[gradwatch.Watch, Kept]:
    """A strict watch whose Records are kept."""
    sink = Kept()
    return gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True, **keys), sink


def events(sink: Kept, *severities: str) -> list[Event]:
    """What was told, of these severities (none given = all)."""
    told = [event for record in sink.records for event in record.verdict.events]
    return [event for event in told if not severities or event.severity in severities]


def exact_norms(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> dict[str, float]:
    """The norms of an unscaled backward, computed on the side in float64 from the model's own gradients."""
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {name: float(torch.linalg.vector_norm(g.double())) for name, g in zip(names, grads, strict=True)}


def norms_in(record: Record) -> dict[str, float]:
    """The norms a Record reports."""
    snapshot = record.snapshot
    return dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))


@dataclass
class ScaledLoop:
    """A loop under a real CPU GradScaler; `bad` are the steps whose loss is multiplied by `poison`.

    `unscale` calls `scaler.unscale_` and clips, as the torch tutorial does; `micro` backwards per step.
    """

    optimizer_of: Callable[[Any], torch.optim.Optimizer]
    bad: frozenset[int] = frozenset()
    unscale: bool = False
    micro: int = 1
    max_norm: float = 0.5
    init_scale: float = 1024.0
    model: nn.Sequential = field(default_factory=net)
    poison: float = float("inf")

    def __post_init__(self) -> None:
        self.optimizer = self.optimizer_of(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale)

    def loss(self, model: nn.Module, step: int, micro: int) -> torch.Tensor:
        """The loss of one backward."""
        return model(X * (1 + micro + 0.1 * step)).pow(2).sum()

    def run(self, steps: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Train; after each step its number and the norms it should be seen with (None of them where bad)."""
        for step in range(steps):
            self.optimizer.zero_grad()
            want = exact_norms(
                self.model, lambda model, step=step: sum(self.loss(model, step, k) for k in range(self.micro))
            )
            for k in range(self.micro):
                poison = self.poison if step in self.bad else 1.0
                self.scaler.scale(self.loss(self.model, step, k) * poison).backward()
            if self.unscale:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            yield step, want

    def weights(self) -> list[torch.Tensor]:
        """Copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]
