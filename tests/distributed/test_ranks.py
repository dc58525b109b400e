"""A capture that nobody waits for closes its windows without asking the ranks, until something about it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.distributed.ranks import Ranks
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the ranks, in order."""
    calls: list[str] = []
    for name in ("arrive", "enter", "depart"):
        original = getattr(Ranks, name)

        def noted(self: Ranks, *args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(Ranks, name, noted)
    return calls


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).pow(2).sum().backward()
    optimizer.step()


def test_the_ranks_are_asked_once_and_again_when_the_parameters_change(
    asked: list[str], tmp_path: Path
) -> None:
    """One meeting, then none; an optimizer given more parameters meets anew, and is watched whole."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), 1e-2)
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True, run_dir=tmp_path):
        step(model, optimizer)
        met, asked[:] = list(asked), []
        for _ in range(3):
            step(model, optimizer)
        calm, asked[:] = list(asked), []
        optimizer.add_param_group({"params": list(model[1].parameters())})
        step(model, optimizer)
        again, asked[:] = list(asked), []
        step(model, optimizer)
    assert {"enter", "depart"} <= set(met)
    assert calm == []
    assert again == ["arrive", "enter", "depart"]
    assert asked == []
    assert [len(record.snapshot.norm) for record in sink.records] == [2, 2, 2, 2, 4, 4]


def test_what_weighs_micro_batches_is_told_of_every_boundary(asked: list[str], tmp_path: Path) -> None:
    """With `drop_micro` a capture is never solitary: its boundary begins with the correction."""
    rules = parse_rules("version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [drop_micro]}}")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with gradwatch.watch(model, optimizer, rules=rules, strict=True, run_dir=tmp_path, listen=None):
        for _ in range(3):
            step(model, optimizer)
    assert asked.count("arrive") == asked.count("depart") == 3


def test_a_step_that_raised_in_between_leaves_nothing_behind(tmp_path: Path) -> None:
    """A skipped step whose own code raises gives the gradients up; the next one is taken as without us."""
    rules = parse_rules("version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [skip_step]}}")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = [param.detach().clone() for param in model.parameters()]

    def raises(*_: Any) -> None:
        raise ZeroDivisionError

    with gradwatch.watch(model, optimizer, rules=rules, strict=True, run_dir=tmp_path, listen=None):
        step(model, optimizer)
        optimizer.zero_grad()
        (model(X) * float("nan")).sum().backward()
        handle = optimizer.register_step_post_hook(raises)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        handle.remove()
        step(model, optimizer)
        got = [param.detach().clone() for param in model.parameters()]
    for param, value in zip(model.parameters(), before, strict=True):
        param.data.copy_(value)
    bare = torch.optim.SGD(model.parameters(), 1e-2)
    step(model, bare)
    step(model, bare)
    assert all(torch.equal(a, b) for a, b in zip(got, model.parameters(), strict=True))
