"""`above_usual` and `below_usual`: a factor off the running geometric mean of a series."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import AboveUsual, BelowUsual, Detector, Sample, State, breaches
from tests.detectors import reference
from tests.support.examples import examples

KINDS = (AboveUsual, BelowUsual)


def drawn(seed: int, length: int = 120) -> list[float | None]:
    """A series that scatters, with values far off, zeros, NaN and infinities, and samples that are missing."""
    rng = np.random.default_rng(seed)
    series: list[float | None] = np.exp(rng.normal(0, 0.5, length)).tolist()
    for k in np.flatnonzero(rng.random(length) < 0.2):
        series[k] = [None, 0.0, math.nan, math.inf, 100.0, 1e-3][int(rng.integers(6))]
    return series


def scores(detector: Detector, series: list[float | None]) -> list[float]:
    """The score of each."""
    state: State = detector.init(1)
    found = []
    for value in series:
        sample = Sample(np.array([7.0 if value is None else value]), np.array([value is not None]))
        found.append(detector.score(state, sample).item())
        state = detector.learn(state, sample)
    return found


@settings(max_examples=examples(50))
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.sampled_from([3.0, 10.0]))
def test_both_are_their_formula(seed: int, kind: type[AboveUsual | BelowUsual], above: float) -> None:
    """A slow reference in plain floats, with missing samples, zeros and what is not finite."""
    detector, series = kind(above=above, half_life=10), drawn(seed)
    usual = reference.OffUsual(kind.SIGN, above, half_life=10, warmup=20)
    np.testing.assert_allclose(scores(detector, series), [usual(value) for value in series], rtol=2e-4)


@pytest.mark.parametrize(("kind", "off"), [(AboveUsual, 150.0), (BelowUsual, 1 / 150.0)])
@pytest.mark.parametrize("scatter", [0.05, 0.5])
def test_a_level_that_stays_off_goes_on_breaching(
    kind: type[AboveUsual | BelowUsual], off: float, scatter: float
) -> None:
    """A hundred and fifty times, or as much less, for 500 samples: all breach, though it scatters; then it is over."""
    rng = np.random.default_rng(0)
    usual = np.exp(rng.normal(0, scatter, 800))
    series = np.concatenate((usual[:200], usual[200:700] * off, usual[700:])).tolist()
    detector = kind(above=20.0)
    found = breaches(detector, np.array(scores(detector, series)))
    assert not found[:200].any()
    assert found[200:700].all()
    assert not found[700:].any()


def test_rebaselined_it_learns_the_new_level() -> None:
    """Samples that breach are not learned until someone says that the new level is meant."""
    detector = AboveUsual(above=10.0)
    state: State = detector.init(1)
    for value in [1.0] * 50 + [50.0] * 300:
        state = detector.learn(state, Sample(np.array([value]), np.ones(1, np.bool_)))
    assert detector.level(state).item() == pytest.approx(1.0)
    state = detector.rebaseline(state, np.ones(1, np.bool_), keep_judging=False)
    for _ in range(50):
        state = detector.learn(state, Sample(np.array([50.0]), np.ones(1, np.bool_)))
    assert detector.level(state).item() == pytest.approx(50.0)
