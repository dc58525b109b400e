"""Calls of a model with other parameters (MAML's adapted ones) are not run again with its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import gradwatch
from tests.support.kept import Kept

AT, STEPS = 12, 14


def adapted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss after a step of gradient descent of its own, differentiated through."""
    own = dict(model.named_parameters())
    loss = functional.mse_loss(functional_call(model, own, (x,)), x.sum(1, keepdim=True))
    grads = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    fast = {name: param - 0.1 * grad for (name, param), grad in zip(own.items(), grads, strict=True)}
    return functional.mse_loss(functional_call(model, fast, (x,)), y)


def perturbed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss at weights that are off by some noise."""
    noisy = {name: param + 0.05 * torch.randn_like(param) for name, param in model.named_parameters()}
    return functional.mse_loss(functional_call(model, noisy, (x,)), y)


@pytest.mark.parametrize("loss_of", [adapted, perturbed])
def test_the_cause_is_not_known_and_no_hardware_is_blamed(
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    """A NaN label: no operation is named, what stands in the way of a replay is, and the step is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, sink = torch.optim.SGD(model.parameters(), 0.01), Kept()
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[sink], strict=True):
        for step in range(STEPS):
            x, y = torch.randn(8, 4), torch.randn(8, 1)
            optimizer.zero_grad()
            loss_of(model, x, y * math.nan if step == AT else y).backward()
            optimizer.step()
    (finding,) = sink.records[AT].findings
    assert (finding.phase, finding.op) in (("unknown", ""), ("loss", ""))  # a call with its own is run again
    assert "called with other parameters (`functional_call`)" in finding.note
    assert sink.records[AT].decision.skip
    assert all(param.isfinite().all() for param in model.parameters())
