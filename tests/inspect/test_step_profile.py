"""A profiled step: the model's modules and gradwatch's own phases stand in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.inspect import profile_step
from gradwatch.runtime.overhead_timer import OverheadTimer
from gradwatch.taps import module_calls


def test_modules_and_own_phases_are_labelled(tmp_path: Path) -> None:
    """Each module, the whole step and each phase of the watch has its calls; nothing stays labelled or hooked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()

    methods = OverheadTimer.begin, OverheadTimer.end
    bare = profile_step(model, step, steps=2)
    assert not [one for one in bare.phases if one.label.startswith("gradwatch")]
    assert bare.own_share == 0
    with gradwatch.watch(model, optimizer, listen=None, run_dir=tmp_path / "run"):
        profiled = profile_step(model, step, steps=2, warmup=1)
    assert steps == 3 + 2 + 1 + 2
    calls = {one.label: one.calls for one in profiled.phases}
    labels = ["step", "forward 0", "forward 1", "forward 2", "forward Sequential"]
    own = ["end of the backward", "before the step", "after the step"]
    assert {
        label: calls.get(label) for label in (*labels, *(f"gradwatch: {one}" for one in own))
    } == dict.fromkeys((*labels, *(f"gradwatch: {one}" for one in own)), 2)
    assert 0 < profiled.own_share < 1
    assert "forward Sequential" in str(profiled)
    assert "aten::addmm" in profiled.table()
    trace = json.loads(profiled.trace(tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert {"forward 1", "gradwatch: before the step"} <= {
        event.get("name") for event in trace["traceEvents"]
    }
    assert (OverheadTimer.begin, OverheadTimer.end) == methods
    assert not any(map(module_calls.noticed, model.modules()))


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    """The exception passes through; modules and the stopwatch are as before."""
    model = nn.Linear(1, 1)
    methods = OverheadTimer.begin, OverheadTimer.end

    def step() -> None:
        model(torch.ones(2, 3))

    with pytest.raises(RuntimeError, match="shapes"):
        profile_step(model, step, warmup=0)
    assert (OverheadTimer.begin, OverheadTimer.end) == methods
    assert not module_calls.noticed(model)


def test_phases_that_an_exception_ended_are_ended() -> None:
    """A step that catches what its forward raised: each label is closed, and those after it nest as they run."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 1))

    def step() -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 1))
        model[0](torch.ones(1, 1))

    calls = {one.label: one.calls for one in profile_step(model, step, steps=2, warmup=0).phases}
    assert calls == {"step": 2, "forward Sequential": 2, "forward 0": 4, "forward 1": 2}
