"""What the tests of acting inside the backward share: rule files, and a small training under watch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
BASELINE = (
    "version: 1\nrules:\n  spike:\n    detect: {kind: spike, of: norm, above: 6}\n"
    "    do: [clip: {to: baseline, at: backward}]\n"
)
CONSTANT = (
    "version: 1\nrules:\n  far:\n    detect: {kind: above, of: norm, threshold: 2.0}\n"
    "    do: [clip: {to: 0.5, at: backward%s}]\n"
)
POLICY = "version: 1\nrules: {}\nclip: {total: {method: %s}, at: %s%s}"
METHODS = [
    "norm, max_norm: 0.5, scope: param",
    "block_rms, threshold: 0.05",
    "normalize, target: 0.1, scope: param",
    "normalize, target: 1.0, low: 0.5, high: 2.0, scope: param",
    "value, clip_value: 0.05",
    "agc, ratio: 0.01",
    "centralize",
    "baseline, above: 2, warmup: 5, half_life: 10, scope: param",
]


class Job:
    """A small regression; `spike` multiplies the loss of a step."""

    def __init__(self, rules: str | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.sink = Kept()
        self.gw = None
        if rules is not None:
            options = {"strict": True, **options}
            self.gw = gradwatch.watch(
                self.model, self.optimizer, rules=parse_rules(rules), sinks=[self.sink], **options
            )

    def backward(self, spike: float = 1.0) -> list[Tensor]:
        """One backward; the gradients it leaves."""
        self.optimizer.zero_grad()
        (self.model(X).pow(2).sum() * spike).backward()
        return self.grads()

    def grads(self) -> list[Tensor]:
        return [param.grad.detach().clone() for param in self.model.parameters() if param.grad is not None]

    def norms(self) -> list[float]:
        return [float(grad.double().norm()) for grad in self.grads()]

    def step(self, spike: float = 1.0) -> list[Tensor]:
        grads = self.backward(spike)
        self.optimizer.step()
        return grads

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def close(self) -> None:
        assert self.gw is not None
        assert self.gw.health.errors() == {}
        self.gw.close()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def plain_norms() -> list[float]:
    bare = Job()
    bare.backward()
    return bare.norms()
