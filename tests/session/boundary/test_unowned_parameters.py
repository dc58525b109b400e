"""Parameters that receive gradients and belong to no optimizer: told, by name, and only where nothing trains them."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.sinks.log import LogSink
from tests.support.kept import Kept

STEPS = 40
Loop = tuple[list[nn.Module], Callable[[int], object]]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def half() -> Loop:
    """The first layer was forgotten, its gradients never cleared."""
    model = _model()
    optimizer = torch.optim.Adam(model[2].parameters(), 1e-3)

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    return [model], step


def given_later() -> Loop:
    """As above, until it is given to the optimizer."""
    [model], _ = half()
    optimizers = [torch.optim.SGD(model[2].parameters(), 0.01)]  # type: ignore[index]

    def step(number: int) -> None:
        if number == STEPS // 2:
            optimizers[0].add_param_group({"params": list(model[0].parameters())})  # type: ignore[index]
        model.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizers[0].step()

    return [model], step


def frozen() -> Loop:
    """A backbone without gradients."""
    loop = half()
    loop[0][0][0].requires_grad_(False)  # type: ignore[index]
    return loop


def by_hand() -> Loop:
    """The other half is moved by the loop's own code."""
    model = _model()
    optimizer = torch.optim.SGD(model[2].parameters(), 0.01)

    def step(_: int) -> None:
        model.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        for param in model[0].parameters():
            assert param.grad is not None
            param.data.add_(param.grad, alpha=-0.01)

    return [model], step


def pair() -> Loop:
    """A GAN: what one side's backward leaves on the other belongs to the other's optimizer, which steps once in 30."""
    made, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    of_made, of_judge = (torch.optim.SGD(one.parameters(), 0.01) for one in (made, judge))

    def step(number: int) -> None:
        of_made.zero_grad()
        judge(made(torch.randn(3, 4))).mean().backward()
        of_made.step()
        if number % 30 == 29:
            of_judge.zero_grad()
            judge(made(torch.randn(3, 4)).detach()).mean().backward()
            of_judge.step()

    return [made, judge], step


def told(loop: Loop) -> tuple[list[tuple[int, str, float]], str]:
    """The Events of the rule, and what the log says, of a watched loop."""
    models, step = loop
    kept, text = Kept(), io.StringIO()
    sinks = [kept, LogSink(stream=text)]
    with gradwatch.watch(models, rules="default", sinks=sinks, strict=True):
        for number in range(STEPS):
            step(number)
    events = [event for record in kept.records for event in record.verdict.events if event.rule == "unowned"]
    return [(event.step, event.kind, event.value) for event in events], text.getvalue()


def test_forgotten_parameters_are_told_once_and_named_in_the_log() -> None:
    """By a warning after sixteen backwards, not at every step."""
    events, log = told(half())
    assert events == [(16, "firing", 2.0)]
    assert log.count("0.weight, 0.bias receive gradients and belong to no optimizer") == 1


def test_the_warning_ends_when_they_are_given_to_the_optimizer() -> None:
    """At the step that takes them up."""
    events, _ = told(given_later())
    assert [(step, kind) for step, kind, _ in events] == [(16, "firing"), (STEPS // 2, "resolved")]


@pytest.mark.parametrize("loop", [frozen, by_hand, pair])
def test_what_something_trains_or_nothing_reaches_is_not_told(loop: Callable[[], Loop]) -> None:
    """Frozen parameters, a hand-written half, the other side of a GAN."""
    events, log = told(loop())
    assert not events
    assert "no optimizer, so that nothing" not in log
