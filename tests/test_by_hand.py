"""Loops that move their weights without an optimizer of torch's: observed from their backwards, never acted on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from tests.kept import Kept

STEPS = 8


class Trained:
    """One training by hand, bare or watched."""

    def __init__(self, *, clip: bool, micros: int, in_place: bool, watched: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kept, self.norms, self.applied, self.losses = Kept(), [], [], []
        gw = gradwatch.watch(self.model, sinks=[self.kept], strict=True) if watched else None
        for step in range(STEPS):
            self.step(step, clip, micros, in_place)
        if gw is not None:
            self.status = gw.status()
            gw.close()
            self.account = gw.account()

    def step(self, step: int, clip: bool, micros: int, in_place: bool) -> None:
        """Backwards, perhaps a clip, and the move; gradients are not finite in the last step but one."""
        params = list(self.model.parameters())
        self.model.zero_grad()
        loss = 0.0
        for _ in range(micros):
            part: Tensor = self.model(torch.randn(3, 4)).square().mean()
            if step == STEPS - 2:
                part = part * float("inf")
            part.backward()
            loss += part.item()
        self.losses.append(loss)
        self.norms.append(total(params))
        if clip:
            nn.utils.clip_grad_norm_(params, 0.1)
        self.applied.append(total(params))
        with torch.no_grad():
            for param in params:
                assert param.grad is not None
                step_of = param.grad.nan_to_num(0, 0, 0) * -0.05
                if in_place:
                    param.add_(step_of)
                else:
                    param.data.add_(step_of)


def total(params: list[nn.Parameter]) -> float:
    """The total norm of the gradients there are."""
    return float(nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]))


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "data"])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["bare", "clipped"])
def test_every_step_is_recorded_and_none_is_touched(clip: bool, micros: int, in_place: bool) -> None:
    """Counted steps are real steps, with norms before and after the clip, losses and labels; weights are as bare."""
    bare = Trained(clip=clip, micros=micros, in_place=in_place, watched=False)
    seen = Trained(clip=clip, micros=micros, in_place=in_place, watched=True)
    for left, right in zip(bare.model.parameters(), seen.model.parameters(), strict=True):
        assert torch.equal(left, right)
    found = [record.snapshot for record in seen.kept.records]
    assert [one.step for one in found] == list(range(STEPS))
    assert [one.micro for one in found] == [micros] * STEPS
    assert [one.total_norm for one in found] == pytest.approx(seen.norms, rel=1e-5, nan_ok=True)
    if clip:
        assert [one.total_norm_applied for one in found] == pytest.approx(seen.applied, rel=1e-4, nan_ok=True)
    assert [one.scalars["loss"] for one in found] == pytest.approx(seen.losses, rel=1e-6)
    assert all(one.scalars["observed_only"] for one in found)
    assert seen.status["observed_only"]
    assert (seen.account.watched.unowned, seen.account.watched.steps) == (STEPS, 0)
    assert "non-finite" in seen.kept.records[STEPS - 2].verdict.firing
    assert not any(record.decision.acts for record in seen.kept.records)


def test_accumulation_for_an_optimizer_not_known_yet_is_no_step_by_hand() -> None:
    """Until weights have moved nothing is claimed: the optimizer that steps at last has the first step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()
    with gradwatch.watch(model, sinks=[kept], strict=True) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        assert not gw.status()["observed_only"]
    assert [record.snapshot.step for record in kept.records] == [0, 1, 2]
    assert not any("observed_only" in record.snapshot.scalars for record in kept.records)


def test_an_optimizer_that_turns_up_takes_over() -> None:
    """Its steps go on from those observed, with a learning rate, and are acted on again."""
    model = nn.Linear(4, 1)
    kept = Kept()
    with gradwatch.watch(model, sinks=[kept], strict=True) as gw:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            for param in model.parameters():
                assert param.grad is not None
                param.data.add_(param.grad, alpha=-0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        assert not gw.status()["observed_only"]
    found = [record.snapshot for record in kept.records]
    assert [one.step for one in found] == list(range(6))
    assert [one.scalars.get("lr") for one in found] == [None, None, None, 0.5, 0.5, 0.5]
