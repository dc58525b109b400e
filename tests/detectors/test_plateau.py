"""`plateau`: a running mean that has had no new best for many samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.detectors import Plateau, Sample, State, breaches
from gradwatch.rules.key_descriptions import described

values = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, 0.0]))


def sample(value: float) -> Sample:
    """One step of one series."""
    return Sample(np.array([value], np.float64), np.ones(1, np.bool_))


def first(series: Any, **keys: Any) -> int | None:
    """The first of these that breaches."""
    detector = Plateau(**keys)
    state: State = detector.init(1)
    for step, value in enumerate(series):
        score, state = detector.advance(state, sample(float(value)))
        assert score is not None
        if breaches(detector, score)[0]:
            return step
    return None


def test_a_slow_smooth_fall_is_progress() -> None:
    """A thousandth a step, far less than `by` from one sample to the next, adds up."""
    assert first(np.exp(-0.001 * np.arange(5000)), steps=100) is None


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_level_that_stays_is_found_after_as_many_steps(noise: float) -> None:
    """The mean takes some half-lives to follow a fall; noise about a level is no progress."""
    rng = np.random.default_rng(0)
    falling = np.maximum(np.exp(-0.02 * np.arange(2000)), 0.1) * np.exp(rng.normal(0.0, noise, 2000))
    found = first(falling, steps=300)
    level = round(math.log(10) / 0.02)
    assert found is not None
    assert level + 300 <= found <= level + 300 + 200


def test_one_lucky_batch_is_no_new_best_that_hides_progress() -> None:
    """A single value far below the others moves the mean by its weight alone, and the fall goes on counting."""
    falling = np.exp(-0.002 * np.arange(3000))
    falling[500] = 1e-6
    assert first(falling, steps=200) is None


def test_higher_may_be_the_better_one() -> None:
    """An accuracy that rises is progress, one that stays is none; a loss the other way round."""
    rising = np.minimum(0.1 + 0.001 * np.arange(2000), 0.9)
    assert (first(rising, steps=300, better="higher") or 0) > 1000
    assert first(rising, steps=300) == 300 + 19


@pytest.mark.parametrize(("warmup", "steps"), [(1, 5), (20, 30)])
def test_the_count_begins_when_the_warm_up_ends(warmup: int, steps: int) -> None:
    """A value that never changes is found at the (warmup + steps)-th sample, as the kind's page and key say."""
    assert first(np.ones(100), steps=steps, warmup=warmup) == warmup + steps - 1
    said = " ".join((Plateau.__doc__ or "").split())
    assert "at the (`warmup` + `steps`)-th sample at the earliest" in said
    assert "`warmup` + `steps` in all" in described(Plateau)["steps"]


def test_what_is_not_finite_or_missing_is_no_sample() -> None:
    """NaN neither counts as a step without progress nor moves the mean."""
    assert first([1.0] * 30 + [math.nan] * 500, steps=100) is None


@given(st.lists(values, max_size=60), st.integers(1, 20), st.sampled_from(["lower", "higher"]))
def test_many_steps_are_judged_as_one_at_a_time(series: list[float], steps: int, better: Any) -> None:
    """`advance_scalars` stops at the first that breaches, in the state of those before it."""
    detector = Plateau(steps=steps, better=better, warmup=5)
    state: State = detector.init(1)
    expected = 0
    for value in series:
        score, after = detector.advance(state, sample(value))
        assert score is not None
        if breaches(detector, score)[0]:
            break
        state, expected = after, expected + 1
    found, reached = detector.advance_scalars(detector.init(1), [{"loss": value} for value in series])
    assert found == expected
    for one, other in zip(reached, state, strict=True):
        assert np.array_equal(one, other)
