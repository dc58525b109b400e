"""A tensor of the loop that no gradient flows to: where it was computed is told, and not only what read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.records.finding import Finding
from tests.support.kept import Kept

Loop = Callable[[nn.Module, Any], None]
STEPS, BAD = 6, 4


def found_in(loop: Loop) -> Finding:
    """The first cause of a training whose fifth step goes wrong."""
    torch.manual_seed(0)
    net, kept = nn.Linear(4, 3), Kept()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with gradwatch.watch(net, optimizer, rules="default", sinks=[kept], strict=True):
        loop(net, optimizer)
    return next(finding for record in kept.records for finding in record.findings)


def weights(net: nn.Module, optimizer: Any) -> None:
    """Weights of classes, one of which is missing, divided by their own sum."""
    for step in range(STEPS):
        y = torch.arange(8) % (2 if step == BAD else 3)
        inverse = 1.0 / torch.bincount(y, minlength=3).float()  # fault
        inverse = inverse / inverse.sum()
        loss = nn.functional.cross_entropy(net(torch.randn(8, 4)), y, weight=inverse)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def goal(net: nn.Module, optimizer: Any) -> None:
    """A logarithm of the data, infinite, and a loss that is."""
    for step in range(STEPS):
        sizes = torch.rand(8, 3) + 1
        if step == BAD:
            sizes[2, 1] = 0
        wanted = torch.log(sizes)  # fault
        loss = nn.functional.mse_loss(net(torch.randn(8, 4)), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def given(net: nn.Module, optimizer: Any) -> None:
    """Weights that the script was given, which no line of it computes."""
    table = torch.ones(STEPS, 3)
    table[BAD, 0] = torch.nan
    for weight in table:
        loss = nn.functional.cross_entropy(net(torch.randn(8, 4)), torch.arange(8) % 3, weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("loop", "op"), [(weights, "reciprocal"), (goal, "log")], ids=["weights", "goal"])
def test_where_it_was_computed(loop: Loop, op: str) -> None:
    """Also where it is made of itself, and where an infinity of it might have been meant."""
    finding = found_in(loop)
    assert (finding.phase, finding.op) == ("forward", op), finding
    assert finding.frame is not None
    assert finding.frame.source.endswith("# fault")
    assert "was computed there" in finding.note


def test_what_was_given_is_named() -> None:
    """No operation of the loop."""
    finding = found_in(given)
    assert finding.phase == "tensor", finding
    assert finding.operands[0].name == "weight"
