"""A NaN that a double backward makes is told as that: the gradient of a gradient, as of a gradient penalty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.records.finding import Finding
from tests.support.kept import Kept


def found_in(power: float) -> Finding:
    """The cause of a training in which a gradient penalty has an infinite slope where an output is 0."""
    torch.manual_seed(0)
    net, kept = nn.Linear(4, 3, bias=False), Kept()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with gradwatch.watch(net, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(6):
            x = torch.randn(8, 4)
            if step == 4:
                x[2] = 0
            x.requires_grad_()
            optimizer.zero_grad()
            energy = net(x).abs().pow(power).sum()  # its slope is differentiated again
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            loss: Tensor = slope.square().mean()
            loss.backward()
            optimizer.step()
    (finding,) = (finding for record in kept.records for finding in record.findings)
    return finding


@pytest.mark.parametrize(("power", "double"), [(1.5, True), (0.5, False)])
def test_it_is_told(power: float, double: bool) -> None:
    """x**1.5 at 0 has a finite slope, and that an infinite one; x**0.5 has none to begin with."""
    finding = found_in(power)
    assert finding.op == "pow", finding
    assert ("double backward" in finding.note) is double, finding
    assert finding.frame is not None
