"""An optimizer after another of the same layout goes on in its place: nothing of the one before is held or learned."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import gradwatch
from tests.support.kept import Kept


def step(model: nn.Module, optimizer: torch.optim.Optimizer, micro: int = 1) -> float:
    """One step, taken by what so many backwards gave; the total norm of that."""
    optimizer.zero_grad()
    for _ in range(micro):
        model(torch.randn(4, 3)).square().mean().backward()
    total = sum(float(param.grad.norm()) ** 2 for param in model.parameters() if param.grad is not None)
    optimizer.step()
    return total**0.5


@pytest.mark.parametrize("copied", [False, True])
def test_steps_count_on_and_every_norm_is_the_new_ones(copied: bool) -> None:
    """Also where the one before took its steps by two backwards, and left one of the next behind."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    recorder, given = Kept(), []
    with gradwatch.watch(net, rules="observe-only", sinks=[recorder], strict=True) as gw:
        for micro in (2, 1, 3):
            model = copy.deepcopy(net) if copied else net
            gw.add([model])
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            given += [step(model, optimizer, micro) for _ in range(5)]
            model(torch.randn(4, 3)).sum().backward()
            del optimizer
    snapshots = [record.snapshot for record in recorder.records]
    assert [one.step for one in snapshots] == list(range(15))
    assert {one.optimizer for one in snapshots} == {0}
    assert [one.total_norm for one in snapshots] == pytest.approx(given, rel=1e-5)
    # At its first step an optimizer is met that was not announced: its gradients are there, however often they came.
    arrivals = [one.calls.tolist() for one in snapshots if one.step % 5]
    assert arrivals == [[2] * 4] * 4 + [[1] * 4] * 4 + [[3] * 4] * 4


def test_the_parameters_before_are_freed() -> None:
    """What a successor has taken the place of is not held."""
    net = nn.Linear(3, 1)
    with gradwatch.watch(net, rules="observe-only", sinks=[Kept()], strict=True) as gw:
        gone = []
        for _ in range(3):
            model = copy.deepcopy(net)
            gw.add([model])
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            step(model, optimizer)
            gone += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight.grad)]
        del model, optimizer
        step(net, torch.optim.SGD(net.parameters(), 0.01))
        assert [ref() for ref in gone] == [None] * 9
