"""Where finite gradients explode or vanish: the gain of every module, against autograd asked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.localise.diagnosis.module_gain import Profile
from gradwatch.localise.held_calls.model_recorder import ModelRecorder
from gradwatch.localise.replay.step_replay import replay
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept


def failed(*error: object) -> None:
    """No fault of ours is expected."""
    raise AssertionError(error)


class Scaled(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Chain(nn.Module):
    """Three layers; between the second and the third everything is multiplied by `between`."""

    def __init__(self, inside: float = 1.0, between: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), Scaled(inside), nn.ReLU(inplace=True))
        self.last = nn.Linear(4, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)) * self.between)


def test_norms_are_those_of_autograd() -> None:
    """Every row of the profile against `autograd.grad` on the same chain, written out."""
    torch.manual_seed(0)
    model, x = Chain(inside=3.0, between=0.5), torch.randn(6, 4)
    holding = ModelRecorder(model, failed)
    model(x).sum().backward()
    profile = Profile([model], failed)
    replay([(model, call) for call in holding.calls], [model], failed, profile)
    a = model.first(x)
    b = model.body[0](a)
    c = model.body[1](b)
    d = torch.relu(c)
    e = model.last(d * 0.5)
    grads = dict(zip("abcd", torch.autograd.grad(e.sum(), (a, b, c, d)), strict=True))
    norm = {name: float(grad.norm()) for name, grad in grads.items()}
    rows = profile.layers()
    assert [row.module for row in rows] == ["first", "body.0", "body.1", "body.2", "last"]
    assert [row.at_output for row in rows[:4]] == pytest.approx([norm["a"], norm["b"], norm["c"], norm["d"]])
    assert [row.at_input for row in rows[1:3]] == pytest.approx([norm["a"], norm["b"]])
    assert math.isnan(rows[0].at_input), "its input wants no gradient"
    assert math.isnan(rows[3].at_input), "a ReLU in place"
    assert rows[4].at_input == pytest.approx(2 * norm["d"])


RULES = """
version: 1
rules:
  suspect:
    detect: {kind: KIND, of: total_norm, threshold: THRESHOLD}
    do: [localise: {by: replay}]
"""


def watched(kind: str, threshold: float, model: nn.Module) -> Finding:
    """The one finding of a few steps under a rule on the total norm."""
    rules = parse_rules(RULES.replace("KIND", kind).replace("THRESHOLD", str(threshold)))
    kept: Any = Kept()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[kept], strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).sum().backward()
            optimizer.step()
    (finding,) = (one for record in kept.records for one in record.findings)
    return finding


@pytest.mark.parametrize(
    ("inside", "between", "at"), [(1e6, 1.0, "body.1"), (1.0, 1e6, "")], ids=["module", "between"]
)
def test_exploding(inside: float, between: float, at: str) -> None:
    """The module that multiplies the gradient by a million is named, or the gap between two that does."""
    torch.manual_seed(0)
    finding = watched("above", 1e3, Chain(inside, between))
    assert (finding.phase, finding.module) == ("exploding", at)
    assert "1e+06" in finding.note
    assert len(finding.profile) == 5


def test_vanishing() -> None:
    """The module that all but stops the gradient is named."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scaled(1e-9), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer_rule = watched("below", 1e9, model)
    assert (optimizer_rule.phase, optimizer_rule.module) == ("vanishing", "1")
    assert Finding.from_dict(optimizer_rule.to_dict()).to_dict() == optimizer_rule.to_dict()
