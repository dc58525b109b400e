"""`diverged`: a loss that is many times the first one, in the first steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Diverged, Sample, State, breaches
from tests.support.examples import examples

losses = st.lists(
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, 0.0, 1e300])),
    min_size=1,
    max_size=20,
)


def sample(value: float) -> Sample:
    """One step of one series."""
    return Sample(np.array([value], np.float64), np.ones(1, np.bool_))


def breaching(series: list[float], **keys: float) -> list[int]:
    """The samples of these that breach."""
    detector, found = Diverged(**keys), []  # type: ignore[arg-type]
    state: State = detector.init(1)
    for step, value in enumerate(series):
        score, state = detector.advance(state, sample(value))
        assert score is not None
        if breaches(detector, score)[0]:
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("series", "found"),
    [
        ([2.3, 1.9, 1.4, 1.2], []),
        ([2.3, 40.0, 200.0, 2.0], [1, 2]),
        ([2.3, math.nan, 40.0], [2]),
        ([0.0, 40.0, 200.0], []),
        ([-5.0, -60.0, 40.0], []),
        ([0.1, -2.0, 0.9], []),
    ],
)
def test_a_factor_over_the_first_loss(series: list[float], found: list[int]) -> None:
    """NaN is no sample; of a first loss that is not positive, and of a loss below 0, nothing is said."""
    assert breaching(series) == found


def test_only_what_begins_in_the_first_samples_is_judged() -> None:
    """A loss that grows later is for other kinds; one that was above the bound by then is judged until it is lower."""
    assert breaching([1.0] * 5 + [20.0] * 5, within=5) == []
    assert breaching([1.0] * 4 + [20.0] * 5 + [1.0] + [20.0] * 5, within=5) == [4, 5, 6, 7, 8]


@settings(max_examples=examples(100))
@given(losses, st.integers(2, 12))
def test_many_steps_are_what_each_is_in_turn(series: list[float], within: int) -> None:
    """`advance_scalars` stops at the first that breaches, and leaves the state that `learn` of each before leaves."""
    detector = Diverged(within=within)
    found = breaching(series, within=within)
    passed, state = detector.advance_scalars(detector.init(1), [{"loss": value} for value in series])
    assert passed == (found[0] if found else len(series))
    other: State = detector.init(1)
    for value in series[:passed]:
        other = detector.learn(other, sample(value))
    assert [field.tolist() for field in state] == [field.tolist() for field in other]  # type: ignore[attr-defined]


def test_a_factor_of_one_is_refused() -> None:
    """Each loss after the first would be judged by noise."""
    with pytest.raises(ValueError, match="greater than 1"):
        Diverged(above=1.0)
