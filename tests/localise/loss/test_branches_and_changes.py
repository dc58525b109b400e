"""Loss code of another branch than the one that ran, and of names that have changed since, is not run again."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradwatch
from gradwatch.localise.loss.interpreter.lost_names import lost_names
from gradwatch.records.finding import Finding
from tests.support.kept import Kept

AT, STEPS = 12, 14


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("aux = (out * w).mean()\nw = w * 2\nextra = (out * w).mean()", {"w"}),
        ("w = w * 2\nextra = (out * w).mean()", set()),
        ("if bad:\n    y[3] = nan\nloss = f(out, y)", set()),
        ("a = f(out, y)\nif bad:\n    y[3] = nan\nloss = a + f(out, y)", {"y"}),
        ("a = f(y)\ny.mul_(2)\nb = f(y)", {"y"}),
        ("a = f(y)\ny.requires_grad_()\nb = f(y)", set()),
        ("y, z = data()\na = f(y)\ny = y + 1\nb = f(y)", set()),
        ("a = sum(p.norm() for p in params)\nb = sum(p for p in others)", set()),
        ("with scaled() as s:\n    a = s * out\ns = 2\nb = s * out", set()),
        ("if first:\n    y = make()\na = f(y)\ny = y * 2\nb = f(y)", {"y"}),
        ("for k in range(3):\n    a = a + w\n    w = w * 2", {"w"}),
    ],
)
def test_names_whose_value_from_before_is_needed_and_gone(source: str, lost: set[str]) -> None:
    """Read as they were, and changed later; not what is assigned first, nor what a comprehension calls so."""
    assert lost_names(ast.parse(source).body) == lost


def other_branch(model: nn.Module, x: Tensor, y: Tensor, bad: bool, first: bool = True) -> None:
    """The gradient is given in the branch that runs; the other one would give NaN as well."""
    if first:
        h = model(x)
        given = torch.ones(8, 1) * (math.nan if bad else 1)
        h.backward(given)
    else:
        loss = functional.mse_loss(model(x), y) * (math.nan if bad else 1)
        loss.backward()


def changed_since(model: nn.Module, x: Tensor, y: Tensor, bad: bool) -> None:
    """The weight is NaN only where it is read for the second time; what it was before is not known."""
    with_weight(model, x, y, bad, torch.ones(1))


def with_weight(model: nn.Module, x: Tensor, y: Tensor, bad: bool, weight: Tensor) -> None:
    """A loss of three parts."""
    out = model(x)
    first = (out * weight).square().mean()
    if bad:
        weight = weight * math.nan
    second = (out * weight).mean()
    (functional.mse_loss(out, y) + first + second).backward()


def found(step: Callable[[nn.Module, Tensor, Tensor, bool], None], path: Path) -> Finding:
    """The cause of the one step that goes wrong."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, sink = torch.optim.SGD(model.parameters(), 0.01), Kept()
    with gradwatch.watch(model, optimizer, run_dir=path, sinks=[sink], strict=True):
        for number in range(STEPS):
            optimizer.zero_grad()
            step(model, torch.randn(8, 4), torch.randn(8, 1), number == AT)
            optimizer.step()
    (finding,) = sink.records[AT].findings
    return finding


@pytest.mark.parametrize("step", [other_branch, changed_since])
def test_no_line_is_named_that_did_not_do_it(
    step: Callable[[nn.Module, Tensor, Tensor, bool], None], tmp_path: Path
) -> None:
    """All gradients are NaN, so that any code which gives NaN would fit: the loss side, and no operation."""
    finding = found(step, tmp_path)
    assert (finding.phase, finding.op) == ("loss", "")


def warning(model: nn.Module, x: Tensor, y: Tensor, bad: bool) -> None:
    """Loss code whose sizes torch warns of."""
    out = model(x)
    loss = functional.mse_loss(out.squeeze(1), y) * (math.nan if bad else 1)
    loss.backward()


def test_what_is_run_again_warns_nobody(tmp_path: Path) -> None:
    """The script has one warning at each step where it asks for all of them."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        found(warning, tmp_path)
    assert len([one for one in shown if "target size" in str(one.message)]) == STEPS


class CountedLoss:
    """A loss that is another one at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor) -> Tensor:
        """Two of its branches have a gradient of NaN where all is zero."""
        if self.calls < AT:
            loss = out.mean()
        elif self.calls == AT:
            loss = out.sqrt().mean()
        else:
            loss = out.pow(0.5).mean()
        self.calls += 1
        return loss


class Training:
    """Trainings of STEPS steps; at AT the gradient is NaN in each of two branches, and the loss is finite."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.calls = 0
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def by_name(self) -> None:
        """The condition is on a name that is another number by the time of the backward."""
        calls = 0
        while calls < STEPS:
            self.optimizer.zero_grad()
            out = self.model(torch.randn(8, 4))
            zero = out * 0
            if calls < AT:
                loss = zero.mean()
            elif calls == AT:
                loss = zero.sqrt().mean()
            else:
                loss = zero.pow(0.5).mean()
            calls += 1
            loss.backward()
            self.optimizer.step()

    def by_attribute(self) -> None:
        """On an attribute."""
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            out = self.model(torch.randn(8, 4))
            zero = out * 0
            if self.calls < AT:
                loss = zero.mean()
            elif self.calls == AT:
                loss = zero.sqrt().mean()
            else:
                loss = zero.pow(0.5).mean()
            self.calls += 1
            loss.backward()
            self.optimizer.step()

    def by_method(self) -> None:
        """In a function that is called."""
        criterion = CountedLoss()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            loss = criterion(self.model(torch.randn(8, 4)) * 0)
            loss.backward()
            self.optimizer.step()


@pytest.mark.parametrize("loop", [Training.by_name, Training.by_attribute, Training.by_method])
def test_a_branch_whose_condition_has_changed_since_is_not_run_again(
    loop: Callable[[Training], None], tmp_path: Path
) -> None:
    """Nothing that the loss is made of needs the statement that changed it."""
    training, sink = Training(), Kept()
    with gradwatch.watch(training.model, training.optimizer, run_dir=tmp_path, sinks=[sink], strict=True):
        loop(training)
    (finding,) = sink.records[AT].findings
    assert (finding.phase, finding.op) == ("loss", "")
    assert "calls" in finding.note
