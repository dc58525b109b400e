"""The step at which parameters join an optimizer is measured like any other, where that can be known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.account.unwatched_reasons import gaps
from gradwatch.session.watch import session_of
from tests.support.kept import Kept
from tests.support.recorder import norms_of

AT, STEPS = 3, 6


def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """All parameters are in the optimizer from the start."""
    model[0].requires_grad_(True)


def add_group(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """As fine-tunes unfreeze layer by layer."""
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})


def freeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Parameters leave and others join."""
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)


def nothing(model: nn.Sequential) -> None:
    """Gradients stay as the backward made them."""


def clip(model: nn.Sequential) -> None:
    """All gradients are changed."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def write(model: nn.Sequential) -> None:
    """A gradient of what has joined is changed."""
    assert model[0].weight.grad is not None
    model[0].weight.grad.mul_(2)


@pytest.mark.parametrize(("between", "exact"), [(nothing, True), (clip, False), (write, False)])
@pytest.mark.parametrize("join", [unfreeze, add_group, freeze])
def test_norms_and_loss_of_the_step_at_which_parameters_join(
    join: Callable[..., None], between: Callable[[nn.Sequential], None], exact: bool, tmp_path: Path
) -> None:
    """The loss is recorded; norms are exact where nothing wrote to gradients, else provisional, and so it is told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    first: Any = (
        model.parameters() if join is not add_group else [p for p in model.parameters() if p.requires_grad]
    )
    optimizer, sink = torch.optim.SGD(first, 0.01), Kept()
    wanted, losses = [], []
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[sink], strict=True) as gw:
        for step in range(STEPS):
            if step == AT:
                join(model, optimizer)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * (1e4 if step == AT else 1)
            loss.backward()
            wanted.append(norms_of(model.named_parameters()))
            losses.append(loss.item())
            if step == AT:
                between(model)
            optimizer.step()
        told = gaps(session_of(gw).account())
    assert [record.snapshot.scalars["loss"] for record in sink.records] == pytest.approx(losses)
    assert [record.snapshot.provisional for record in sink.records] == [
        step == AT and not exact for step in range(STEPS)
    ]
    snapshot = sink.records[AT].snapshot
    if exact:
        norms = dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))
        assert norms == pytest.approx(wanted[AT], rel=1e-5)
    assert any("1 step judged for NaN and Inf alone" in gap for gap in told) != exact


def test_a_window_of_two_steps_stays_one_when_parameters_join(tmp_path: Path) -> None:
    """The step before has raised, and nothing has cleared its gradients: they are no measure of what a step brings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    optimizer, sink = torch.optim.SGD(model.parameters(), 0.01), Kept()

    def refuse(*_: Any) -> None:
        raise ValueError

    with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[sink], strict=True):
        for step in range(STEPS):
            if step == AT:
                model[0].requires_grad_(True)
            model(torch.randn(8, 4)).square().mean().backward()
            if step == AT - 1:
                hook = optimizer.register_step_pre_hook(refuse)
                with pytest.raises(ValueError):
                    optimizer.step()
                hook.remove()
                continue
            optimizer.step()
            optimizer.zero_grad()
    assert [r.snapshot.step for r in sink.records if r.snapshot.provisional] == [AT]
