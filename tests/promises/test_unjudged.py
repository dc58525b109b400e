"""A fault of ours, or of a plug-in policy, on the very step that has to be skipped: it is skipped all the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.checkpoint.health_tracker import CheckpointHealthTracker
from gradwatch.engine import BoundEngine
from gradwatch.engine.judge import Step
from gradwatch.policies import Policy, State, register_policy
from gradwatch.policies.policy import POLICIES, Coefficients, Floats
from gradwatch.records.snapshot import BoolArray
from gradwatch.rules.files import parse_rules
from gradwatch.session.pipeline import record_publishing
from gradwatch.session.pipeline import step_pipeline as judging
from tests.support.kept import Kept

SKIP = """
version: 1
rules:
  nf:
    detect: {kind: nonfinite, of: norm}
    do: [skip_step: {}]
"""
FAULTS: dict[str, tuple[Any, str, str]] = {
    "health tag": (CheckpointHealthTracker, "after", "boundary"),
    "verdict": (Step, "finish", "engine"),
    "decision": (BoundEngine, "decide", "engine"),
    "what is told": (record_publishing, "Record", "boundary"),
    "measured": (judging, "assemble", "boundary"),
}


@pytest.fixture
def plugged_in() -> Iterator[type[Policy]]:
    """A plug-in policy that does what `what` says, registered for the length of a test."""

    @register_policy
    @dataclass(frozen=True, slots=True)
    class Mine(Policy):
        """As the file wants it."""

        method: ClassVar[str] = "mine"
        what: str = "nan"

        def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
            """Nothing a gradient should be multiplied by."""
            if self.what == "shape":
                return np.ones(len(norms) + 1, np.float32)
            if self.what == "raise":
                raise RuntimeError("plug-in")
            return np.full(len(norms), float(self.what), np.float32)

        def learn(self, state: State, norms: Floats, present: BoolArray) -> State:
            """Fails together with the factors."""
            if self.what == "raise":
                raise RuntimeError("plug-in")
            return state

    yield Mine
    del POLICIES["mine"]


def job(rules: str, tmp_path: Path) -> tuple[nn.Module, torch.optim.Optimizer, Any, Kept]:
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 2), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = gradwatch.watch(
        model, optimizer, rules=parse_rules(rules), sinks=[kept], run_dir=tmp_path / "run"
    )
    return model, optimizer, watch, kept


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.randn(3, 4)).square().mean() * scale).backward()
    optimizer.step()


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("ours")


@pytest.mark.parametrize("where", FAULTS)
def test_a_fault_on_the_step_that_must_be_skipped_does_not_cost_the_skip(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process: whatever of ours fails after the NaN was read, the weights stay as they were."""
    model, optimizer, watch, _ = job(SKIP, tmp_path)
    owner, name, component = FAULTS[where]
    for _ in range(3):
        step(model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    with monkeypatch.context() as hurt:
        hurt.setattr(owner, name, boom)
        step(model, optimizer, math.nan)
    assert all(map(torch.equal, before, model.parameters()))
    assert watch.status()["internal_errors"] == {component: 1}
    step(model, optimizer)
    assert not any(map(torch.equal, before, model.parameters()))
    watch.close()


def test_a_fault_keeps_the_elementwise_clips_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a verdict the standing clips hold, those by element too."""
    rules = SKIP + "clip: {total: {method: value, clip_value: 0.001}}\n"
    model, optimizer, watch, _ = job(rules, tmp_path)
    step(model, optimizer)
    monkeypatch.setattr(Step, "finish", boom)
    step(model, optimizer, 1e3)
    assert (
        max(float(param.grad.abs().max()) for param in model.parameters() if param.grad is not None) < 0.00101
    )
    watch.close()


@pytest.mark.parametrize("what", ["nan", "inf", "-1", "raise", "shape"])
def test_a_policy_at_fault_is_counted_and_costs_neither_gradient_nor_skip(
    what: str, tmp_path: Path, plugged_in: Callable[..., Any]
) -> None:
    """Its factors are 1, on as many steps as it likes; the watch is not paused for it, and a NaN is skipped."""
    clip = f"groups: {{g: {{params: ['*']}}}}\nclip: {{groups: {{g: {{method: mine, what: '{what}'}}}}}}\n"
    model, optimizer, watch, kept = job(SKIP + clip, tmp_path)
    for _ in range(6):
        before = [param.detach().clone() for param in model.parameters()]
        step(model, optimizer)
        for param, was in zip(model.parameters(), before, strict=True):
            assert param.grad is not None
            assert torch.equal(param.detach(), was.add(param.grad, alpha=-0.1))
    before = [param.detach().clone() for param in model.parameters()]
    step(model, optimizer, math.nan)
    assert all(map(torch.equal, before, model.parameters()))
    watch.flush()
    assert [record.decision.skip for record in kept.records] == [False] * 6 + [True]
    counted = watch.status()["internal_errors"]
    assert set(counted) == {"action"}
    assert counted["action"] >= 7
    watch.close()
