"""A NaN that BatchNorm has taken up: no skipped step brings its running statistics back, and gradwatch says so."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.capture.columns.nonfinite_running_statistics import AGAIN, RunningStatistics
from gradwatch.capture.weights import weight_health
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

SKIPS = parse_rules("version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [skip_step]}}")


class Loop:
    """A loop over a model with BatchNorm; `step(nan)` trains on one batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, value: float = 1.0) -> None:
        """One step; the first element of the batch is multiplied by `value`."""
        x = torch.randn(8, 3)
        x[0, 0] *= value
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    @property
    def norm(self) -> nn.BatchNorm1d:
        layer = self.model[1]
        assert isinstance(layer, nn.BatchNorm1d)
        return layer


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_leaves_spoilt_statistics_and_no_healthy_checkpoint(value: float) -> None:
    """Weights and gradients are finite again at once; evaluation is not, so no checkpoint is one to go back to."""
    loop, kept = Loop(), Kept()
    with gradwatch.watch(loop.model, loop.optimizer, rules=SKIPS, sinks=[kept]) as gw:
        loop.step()
        assert gw.healthy
        loop.step(value)
        for _ in range(3):
            loop.step()
            assert math.isfinite(kept.records[-1].snapshot.total_norm)
        assert not loop.model.eval()(torch.ones(1, 3)).isfinite().all()  # what healthy must not vouch for
        loop.model.train()
        assert not gw.healthy
        assert gw.last_healthy_step == 0
        assert any("1.running_mean" in reason for reason in kept.records[-1].checkpoint.reasons)
        assert gw.status()["internal_errors"] == {}
        loop.norm.reset_running_stats()
        for _ in range(AGAIN):
            loop.step()
        assert gw.healthy


def test_a_forward_without_backward_is_found_by_the_looks_at_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No gradient tells of it: the next look that is due does, and takes back what was said since the one before."""
    loop, kept, clock = Loop(), Kept(), [0.0]
    monkeypatch.setattr(weight_health, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    with gradwatch.watch(loop.model, loop.optimizer, rules=SKIPS, sinks=[kept]) as gw:
        for step in range(25):
            if step == 12:
                with torch.no_grad():
                    loop.model(torch.full((4, 3), math.inf))
            clock[0] += 10.0 if step in (5, 10, 20) else 0.0  # a look is due
            loop.step()
        found = [record.checkpoint for record in kept.records]
        assert [one.healthy for one in found] == [True] * 20 + [False] * 5
        assert {one.last_healthy_step for one in found[20:]} == {9}
        assert not gw.healthy
        assert gw.last_healthy_step == 9
        loop.norm.reset_running_stats()
        assert gw.healthy


def test_statistics_ruined_without_a_trace_are_dated_by_the_last_look() -> None:
    """Found only when asked, steps that no look has vouched for are not called healthy."""
    loop = Loop()
    with gradwatch.watch(loop.model, loop.optimizer, rules=SKIPS, sinks=[]) as gw:
        loop.step()
        assert gw.healthy
        loop.step()
        with torch.no_grad():
            loop.model(torch.full((4, 3), math.inf))
        loop.step()
        assert not gw.healthy
        assert gw.last_healthy_step == 0


def test_a_nan_that_is_no_batchs_leaves_the_checkpoints_alone() -> None:
    """A gradient that is not finite, over a finite forward, spoils no statistics: healthy again at the next step."""
    loop = Loop()
    with gradwatch.watch(loop.model, loop.optimizer, rules=SKIPS, sinks=[]) as gw:
        loop.step()
        handle = loop.model[0].weight.register_hook(lambda grad: grad * math.nan)  # type: ignore[union-attr, operator]
        loop.step()
        handle.remove()
        assert not gw.healthy
        loop.step()
        assert gw.healthy


def test_it_is_told_once_and_looked_at_rarely() -> None:
    """One line per find, naming the layer and the way out; on healthy steps nothing is looked at."""
    loop, said = Loop(), []
    looks: list[int] = []

    def models() -> list[nn.Module]:
        looks.append(1)
        return [loop.model]

    statistics = RunningStatistics(models, lambda component, error: said.append(str(error)))
    assert statistics.nonfinite(False) == ()
    assert looks == []
    loop.norm.running_var.fill_(math.nan)  # type: ignore[union-attr]
    assert statistics.nonfinite(True) == ("1.running_var",)
    for _ in range(AGAIN - 1):
        assert statistics.nonfinite(False) == ("1.running_var",)
    assert len(looks) == 1
    assert len(said) == 1
    assert "1.running_var" in said[0]
    assert "reset_running_stats()" in said[0]
    loop.norm.reset_running_stats()
    assert statistics.nonfinite(False) == ()
