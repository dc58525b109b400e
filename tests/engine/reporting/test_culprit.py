"""The parameter that an Event about the total names: the one that left its own level, and none where all did."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.detectors import Above, BelowRecentMin, Spike
from tests.engine.cases import OptimizerRules, bound, rule

LEVELS = np.array([5.0, 0.01, 1.0, 0.5])
RULES = [
    rule("own-levels", Spike(above=1e6), scope="param"),
    rule("total", Above(of="total_norm", threshold=20.0)),
    rule("part", Above(threshold=3.0), scope="total", exclude=("layers.0.*",)),
    rule("fall", BelowRecentMin(of="total_norm", above=2.0, window=10, lag=1, warmup=5), for_=1),
]


def first_cause(factors: list[float], steps: int = 40, rules: tuple[str, ...] = ("total", "fall")) -> str:
    """The first cause of an Event of the total, when norms at their levels are multiplied by these."""
    rng = np.random.default_rng(0)
    watched = OptimizerRules(bound(RULES))
    for step in range(steps):
        watched.step(step, (LEVELS * np.exp(rng.normal(0, 0.05, 4))).tolist())
    events = watched.step(steps, (LEVELS * factors).tolist()).events
    return next(one.first_cause for one in events if one.rule in rules)


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        ([1, 1, 100, 1], "layers.1.weight"),
        ([8, 1, 90, 1], "layers.1.weight"),  # not the one with the largest norm
        ([10, 10, 10, 10], ""),  # all alike: nobody is at fault
        ([20, 1, 1, 18], "layers.0.weight"),
        ([5, 150, 5, 5], ""),  # moved most, and far too small to have moved the total
        ([0.01, 1, 1, 1], "layers.0.weight"),
        ([0.0, 0.0, 0.0, 0.0], ""),
        ([10, 10, 30, 10], ""),  # all moved; that is the scatter of one
        ([0.01, 0.01, 0.003, 0.004], ""),
    ],
)
def test_the_one_that_left_its_own_level_is_named(factors: list[float], named: str) -> None:
    """Not the first of a list, nor the largest; none where all moved together, or what moved cannot be the reason."""
    assert first_cause(factors) == named


def test_nobody_is_named_before_there_are_levels() -> None:
    """Within the warm-up it is not known what is usual."""
    assert first_cause([1, 1, 100, 1], steps=5) == ""


def test_only_what_is_in_the_total_is_named() -> None:
    """A rule about the total of some parameters names none of the others, however far they moved."""
    assert first_cause([1000, 1, 50, 1], rules=("part",)) == "layers.1.weight"
    assert first_cause([1000, 1, 4.5, 1], rules=("total",)) == "layers.0.weight"
