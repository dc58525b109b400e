"""Loops that forget to clear, clear too early, or clip in the wrong place: found by the default pack, others not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradwatch
from gradwatch.sinks.log import LogSink
from tests.capture.loop_faults.loops import FAULTY, HEALTHY, Loop
from tests.launch.test_training import run
from tests.support.kept import Kept
from tests.support.on_device import gradients_on_device

STEPS = 18
ABOUT_LOOPS = frozenset({"no-zero-grad", "discarded-before-step", "clip-of-scaled", "clip-without-effect"})


def firing(loop: Loop, steps: int = STEPS) -> tuple[list[tuple[str, int]], str]:
    """(rule, step) of everything in the default pack that has fired with an alarm, and the log."""
    models, step = loop
    kept, text = Kept(), io.StringIO()
    with gradwatch.watch(models, rules="default", sinks=[kept, LogSink(stream=text)], strict=True):
        for _ in range(steps):
            step()
    events = [
        (event.rule, event.step)
        for record in kept.records
        for event in record.verdict.events
        if event.kind == "firing" and event.notify
    ]
    return events, text.getvalue()


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_loops_that_do_as_they_should_are_left_in_peace(make: Callable[[], Loop]) -> None:
    """No rule about the loop fires, however gradients are cleared, accumulated, clipped and scaled."""
    events, log = firing(make(), 80)
    assert not ABOUT_LOOPS.intersection(rule for rule, _ in events), events
    assert "never cleared" not in log


@pytest.mark.parametrize(("rule", "make"), FAULTY.values(), ids=FAULTY)
def test_each_fault_of_a_loop_is_one_alarm_within_ten_steps(rule: str, make: Callable[[], Loop]) -> None:
    """The rule that is about it fires, once, and no other."""
    events, log = firing(make())
    assert [name for name, _ in events] == [rule]
    assert events[0][1] < 10
    assert log.count("gradients of 0.weight, 0.bias, ") == (rule == "no-zero-grad")


@pytest.mark.parametrize(("rule", "make"), FAULTY.values(), ids=FAULTY)
def test_on_a_device_they_are_found_too(
    rule: str, make: Callable[[], Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing may be waited for."""
    gradients_on_device(monkeypatch)
    events, _ = firing(make())
    assert rule in {name for name, _ in events}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_on_a_device_healthy_loops_are_left_in_peace(
    make: Callable[[], Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that were cleared in place are not taken for those that were not."""
    gradients_on_device(monkeypatch)
    events, _ = firing(make(), 80)
    assert not ABOUT_LOOPS.intersection(rule for rule, _ in events), events


@pytest.mark.parametrize(("_", "make"), FAULTY.values(), ids=FAULTY)
def test_a_loop_is_not_changed_by_being_looked_at(_: str, make: Callable[[], Loop]) -> None:
    """Its weights are bit for bit those of the same loop that nothing watches."""
    left = []
    for watched in (True, False):
        models, step = make()
        with (
            gradwatch.watch(models, rules="default", sinks=[Kept()], strict=True)
            if watched
            else torch.enable_grad()
        ):
            for _ in range(STEPS):
                step()
        left.append([param.detach().clone() for model in models for param in model.parameters()])
    assert all(map(torch.equal, *left))


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(12):
    CLEAR
    scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
    CLIP
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("clear", "clip", "rule"),
    [
        ("pass", "pass", "no-zero-grad"),
        ("optimizer.zero_grad()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "clip-of-scaled"),
        (
            "optimizer.zero_grad(); nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "pass",
            "clip-without-effect",
        ),
    ],
)
def test_a_script_as_it_is_hears_of_its_fault(clear: str, clip: str, rule: str, tmp_path: Path) -> None:
    """`gradwatch run` of a loop that nothing was done to."""
    done = run(tmp_path, SCRIPT.replace("CLEAR", clear).replace("CLIP", clip))
    assert done.returncode == 0, done.stderr
    assert f"rule={rule} severity=warning" in done.stderr


def test_a_loop_that_is_mended_hears_no_more() -> None:
    """Once gradients are cleared the alarm is over."""
    models, step = FAULTY["no zero_grad"][1]()
    kept = Kept()
    with gradwatch.watch(models, rules="default", sinks=[kept], strict=True):
        for number in range(STEPS):
            if number >= STEPS // 2:
                models[0].zero_grad()
            step()
    events = [
        event for record in kept.records for event in record.verdict.events if event.rule == "no-zero-grad"
    ]
    assert [event.kind for event in events] == ["pending", "firing", "resolved"]
    assert events[-1].step <= STEPS // 2 + 2
