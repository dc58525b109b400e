"""Learning rates of every kind that optimizers keep: what is one number is recorded, the rest is told as missing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.session.pipeline.learning_rate import learning_rate
from gradwatch.session.watch import session_of
from tests.support.kept import Kept

STEPS = 4


class Plain(torch.optim.Optimizer):
    """Moves the weights by a hundredth, whatever its options say."""

    def __init__(self, params: Any, options: dict[str, Any]) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * 0.01)


KINDS: dict[str, tuple[dict[str, Any], float | None]] = {
    "none kept": ({}, None),
    "its own, as Adafactor's": ({"lr": None}, None),
    "a schedule": ({"lr": lambda step: 0.01}, None),
    "one for each dimension": ({"lr": (0.01, 0.02)}, None),
    "an array": ({"lr": np.array([0.01, 0.02])}, None),
    "a word": ({"lr": "auto"}, None),
    "a vector": ({"lr": torch.tensor([0.01, 0.02])}, None),
    "complex": ({"lr": 1j}, None),
    "beyond floats": ({"lr": 10**400}, float("inf")),
    "of numpy": ({"lr": np.float32(0.25)}, 0.25),
    "an integer": ({"lr": 1}, 1.0),
    "a tensor": ({"lr": torch.tensor(0.25, requires_grad=True)}, 0.25),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_step_is_recorded_with_the_rate_if_it_is_one_number(name: str, tmp_path: Path) -> None:
    """All steps are judged; where the rate is unknown its rules say so, and `lr-zero` does not fire."""
    options, expected = KINDS[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, sink = Plain(model.parameters(), options), Kept()
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[sink], strict=True) as gw:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        account = session_of(gw).account()
    assert [record.snapshot.scalars.get("lr") for record in sink.records] == [expected] * STEPS
    assert account.watched.steps == STEPS
    assert ("lr-zero" in account.no_data) == (expected is None)
    assert not [e for record in sink.records for e in record.verdict.events if e.rule == "lr-zero"]


GROUPS: dict[str, tuple[list[tuple[Any, bool]], float | None]] = {
    "a frozen backbone by its rate": ([(0.0, True), (0.01, True)], 0.01),
    "a head that wants no gradient": ([(0.0, True), (0.01, False)], 0.0),
    "none is trained": ([(0.0, False), (0.01, False)], 0.01),
    "a tensor beside a float": ([(torch.tensor(0.25), True), (0.01, True)], 0.25),
    "one that finds its own": ([(0.0, True), (None, True)], None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_rate_of_several_groups_is_the_largest_of_those_that_are_trained(name: str) -> None:
    """A group that wants no gradient counts where no other does; one whose rate is unknown may train by its own."""
    groups, expected = GROUPS[name]
    optimizer = Plain(
        [{"params": [nn.Parameter(torch.ones(2), trained)], "lr": rate} for rate, trained in groups], {}
    )
    assert learning_rate(optimizer) == expected


@pytest.mark.parametrize("rates", [(0.1, math.nan), (math.nan, 0.1)])
def test_a_rate_that_is_nan_is_the_largest(rates: tuple[float, float]) -> None:
    """Whatever group has it: a comparison with NaN would hide it."""
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    found = learning_rate(Plain(groups, {}))
    assert isinstance(found, float)
    assert math.isnan(found)


@pytest.mark.parametrize(("head", "fires"), [(0.01, False), (0.0, True)])
def test_a_rate_of_zero_is_told_where_every_group_has_it(head: float, fires: bool, tmp_path: Path) -> None:
    """A backbone at 0 beside a head that learns is transfer learning."""
    torch.manual_seed(0)
    body, top = nn.Linear(4, 4), nn.Linear(4, 1)
    groups = [{"params": body.parameters(), "lr": 0.0}, {"params": top.parameters(), "lr": head}]
    model, optimizer, sink = nn.Sequential(body, top), torch.optim.SGD(groups, 0.1), Kept()
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[sink], strict=True):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    assert [record.snapshot.scalars["lr"] for record in sink.records] == [head] * 8
    assert any(e.rule == "lr-zero" for record in sink.records for e in record.verdict.events) == fires


def test_an_optimizer_without_groups_has_no_rate(tmp_path: Path) -> None:
    """Its step is taken as without a watch."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[Kept()], strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        optimizer.param_groups.clear()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
