"""Jumps of a learning rate: those that leave the schedule are told, and the schedules of torch never are."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from gradwatch.detectors import LrJump, may_breach
from gradwatch.detectors.detector import Sample
from tests.detectors.test_detectors import scores
from tests.support.examples import examples

STEPS = 400
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "constant": lr_scheduler.ConstantLR,
    "linear": lambda one: lr_scheduler.LinearLR(one, 0.001, total_iters=50),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(one, 1.0, total_steps=STEPS + 1),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 60),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 1e-4, 1.0, step_size_up=50, cycle_momentum=False),
    "exponential": lambda one: lr_scheduler.ExponentialLR(one, 0.97),
    "warm-up of transformers": lambda one: lr_scheduler.LambdaLR(one, lambda step: min(1.0, step / 40)),
    "Noam": lambda one: lr_scheduler.LambdaLR(one, lambda t: min((t + 1) ** -0.5, (t + 1) * 40**-1.5)),
}


def rates(name: str) -> list[float | None]:
    """The learning rates of a schedule, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    schedule, found = SCHEDULES[name](optimizer), []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_of_torch_breaches(name: str) -> None:
    """From a start at a thousandth, or at 0, to restarts at a hundredfold."""
    assert not any(score > 3.5 for score in scores(LrJump(), rates(name)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_beyond_a_schedule_breaches_at_its_step(name: str) -> None:
    """Ten times the largest so far, at step 300."""
    found = rates(name)
    jumped = 10 * max(rate or 0.0 for rate in found[:300])
    assert scores(LrJump(), [*found[:300], jumped])[-1] > 9


def test_what_is_no_rate_is_neither_judged_nor_learned() -> None:
    """Zero, and a step without one."""
    found = scores(LrJump(), [*[1e-3] * 10, 0.0, None, 1e-2])
    assert [math.isnan(score) for score in found] == [True] * 12 + [False]
    assert found[-1] == pytest.approx(10)


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("before", [0, 3, 20])
def test_a_rate_that_is_not_finite_breaches_at_once(rate: float, before: int) -> None:
    """It ruins every weight, whatever was before it; what follows is compared with what was before."""
    found = scores(LrJump(), [*[1e-3] * before, rate, 1e-3])
    assert found[before] == math.inf
    assert not found[-1] > 1


def test_a_rate_beyond_single_precision_is_one(recwarn: pytest.WarningsRecorder) -> None:
    """1e300 breaches by the largest factor there is, and no warning is given."""
    detector = LrJump()
    state = detector.init(1)
    for value in [1e-3] * 10 + [1e300]:
        sample = Sample(np.array([value]), np.ones(1, np.bool_))
        score, state = detector.score(state, sample), detector.learn(state, sample)
    assert detector.indifferent(state, lambda _: 1e300)
    assert math.isfinite(score[0])
    assert score[0] > 1e40
    assert not recwarn.list


@settings(max_examples=examples(100))
@given(
    st.lists(st.sampled_from([1e-4, 1e-3, 1e-3, 2e-3, 1e-2, 0.0]), min_size=1, max_size=80),
    st.integers(1, 32),
)
def test_many_steps_are_judged_as_one_at_a_time(values: list[float], cut: int) -> None:
    """Up to the first that breaches, with the same state."""
    detector = LrJump()
    x = detector.logs_of(values)[:, None]
    one, many, at = detector.init(1), detector.init(1), 0
    while at < len(x):
        count, many = detector.advance_many_logs(many, x[at : at + cut])
        for each in x[at : at + count]:
            score, one = detector.advance_logs(one, each)
            assert score is None or not may_breach(detector, score)
        for mine, theirs in zip(one, many, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        at += count
        if count < cut and at < len(x):
            (_, one), (_, many) = detector.advance_logs(one, x[at]), detector.advance_logs(many, x[at])
            at += 1
