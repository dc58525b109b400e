"""Learning rates of every kind that optimizers keep: what is one number is recorded, the rest is told as missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
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
