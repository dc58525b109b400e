"""Loops that forget to clear, clear too early, or clip in the wrong place: found by the default pack, others not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradwatch
from gradwatch.sinks.log import LogSink
from tests.capture.loop_faults.loops import FAULTY, HEALTHY, Loop, loss, model
from tests.launch.test_training import run
from tests.support.kept import Kept
from tests.support.on_device import gradients_on_device

STEPS = 18
SCALED = "scaled-before-step"
ABOUT_LOOPS = frozenset(
    {"no-zero-grad", "discarded-before-step", "clip-of-scaled", "clip-without-effect", SCALED}
)


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


# Each fault has its alarm within ten steps; of the steps that are judged together a soak has more.
@pytest.mark.parametrize("steps", [2 * STEPS, pytest.param(80, marks=pytest.mark.soak)])
@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_on_a_device_healthy_loops_are_left_in_peace(
    make: Callable[[], Loop], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that were cleared in place are not taken for those that were not."""
    gradients_on_device(monkeypatch)
    events, _ = firing(make(), steps)
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


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0])
def test_gradients_that_are_multiplied_from_some_step_on_are_told(factor: float, clips: bool) -> None:
    """By one alarm with the factor, and no more of it once they are let be."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    kept = Kept()
    with gradwatch.watch(net, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(60):
            optimizer.zero_grad()
            loss(net).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            for param in net.parameters() if 30 <= step < 50 else ():
                assert param.grad is not None
                param.grad.mul_(factor)
            optimizer.step()
    events = [
        (event.kind, event.step)
        for record in kept.records
        for event in record.verdict.events
        if event.rule == SCALED
    ]
    assert events == [("pending", 31), ("firing", 33), ("resolved", 50)]
    assert kept.records[40].snapshot.scalars["scaled_by"] == pytest.approx(factor)


@pytest.mark.parametrize("way", ["from the start", "by hand, to a norm", "noise", "one layer", "by torch"])
def test_what_loops_do_to_gradients_on_purpose_is_not_told(way: str) -> None:
    """A division from the start, a clip by hand that begins to bite, noise, one layer, and a clip of torch's."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    kept = Kept()

    def change(step: int) -> None:
        grads = [param.grad for param in net.parameters() if param.grad is not None]
        if way == "from the start":
            torch._foreach_mul_(grads, 0.25)
        elif step < 30:
            pass
        elif way == "by hand, to a norm":
            torch._foreach_mul_(grads, 0.01 / torch.cat([grad.flatten() for grad in grads]).norm())
        elif way == "noise":
            for grad in grads:
                grad.add_(torch.randn_like(grad), alpha=1e-3)
        elif way == "one layer":
            grads[0].mul_(0.5)
        else:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)

    with gradwatch.watch(net, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(60):
            optimizer.zero_grad()
            loss(net).backward()
            change(step)
            optimizer.step()
    assert not [
        event
        for record in kept.records
        for event in record.verdict.events
        if event.kind == "firing" and event.rule == SCALED
    ]
