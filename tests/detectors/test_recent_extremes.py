"""Samples against the extremes of a window before them: the formula, many at once, what z does not see."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import AboveRecentMax, BelowRecentMin, Drift, Spike, may_breach
from tests.detectors import reference
from tests.detectors.test_detectors import as_float32, assert_close, sample_of, scores, values_of_one_series
from tests.support.examples import examples

Kind = type[AboveRecentMax] | type[BelowRecentMin]
kinds = st.sampled_from([AboveRecentMax, BelowRecentMin])


@settings(max_examples=examples(150))
@given(kinds, values_of_one_series, st.integers(1, 40), st.integers(0, 12), st.integers(1, 30))
def test_the_score_is_its_formula(
    kind: Kind, series: list[float | None], window: int, lag: int, warmup: int
) -> None:
    """With holes, zeros, NaN and outliers of a factor of a million, windows that no ten parts fill included."""
    plain = [value if value is None or not 0 < value < 1e-30 else 1e-29 for value in as_float32(series)]
    slow = reference.RecentExtreme(kind.SIGN, 3.0, window, lag, warmup)
    detector = kind(above=3.0, window=window, lag=lag, warmup=warmup)
    found, expected = scores(detector, plain), [slow(value) for value in plain]
    assert_close(np.log(found).tolist(), np.log(expected).tolist(), 1e-3)


@settings(max_examples=examples(300))
@given(
    kinds,
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.integers(0, 30),
    st.integers(1, 30),
    st.integers(1, 4),
)
def test_many_steps_are_judged_as_one_at_a_time(
    kind: Kind, seed: int, window: int, lag: int, warmup: int, size: int
) -> None:
    """Up to the first that breaches anywhere, bit by bit in the state."""
    rng = np.random.default_rng(seed)
    detector = kind(window=window, lag=lag, warmup=warmup, above=float(rng.choice([1.5, 4.0])))
    x = rng.normal(0, 0.3, (int(rng.integers(1, 160)), size)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] += float(rng.choice([-3.0, 3.0]))
    one, many, t = detector.init(size), detector.init(size), 0
    while t < len(x):
        count, many = detector.advance_many_logs(many, x[t : t + 32])
        for each in x[t : t + count]:
            score, one = detector.advance_logs(one, each)
            assert score is None or not may_breach(detector, score)
        for mine, theirs in zip(one, many, strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        t += count
        if t < len(x) and count < 32:  # what ended the block is judged by itself
            (_, one), (_, many) = detector.advance_logs(one, x[t]), detector.advance_logs(many, x[t])
            t += 1


@settings(max_examples=examples(100))
@given(
    st.sampled_from([AboveRecentMax, BelowRecentMin, Drift]),
    st.integers(1, 60),
    st.integers(0, 40),
    st.integers(1, 50),
)
def test_the_samples_it_needs_are_those_it_has_when_it_first_judges(
    kind: Kind | type[Drift], window: int, lag: int, warmup: int
) -> None:
    """A lag longer than the warm-up included: nothing is old enough to compare with, and nobody would be told."""
    detector = kind(window=window, lag=lag, warmup=warmup)
    state, needed = detector.init(1), detector.samples_needed
    for seen in range(needed + 2 * window + lag):
        _, state = detector.advance(state, sample_of([1.0]))
        judged = not np.isnan(detector.score(state, sample_of([1.0]))[0])
        assert judged == (seen + 1 >= needed) == (int(state.n[0]) >= needed)


def test_a_jump_that_scatter_hides_from_z_is_seen_at_once() -> None:
    """Norms over five orders of magnitude: ten times the largest of the last hundred is 1.7 deviations."""
    rng = np.random.default_rng(0)
    calm = np.exp(rng.normal(0, 2.5, 300)).tolist()
    spike = 10 * max(calm[-100:])
    assert not scores(Spike(), [*calm, spike])[-1] > 6
    found = scores(AboveRecentMax(), [*calm, spike])
    assert found[-1] > 9
    assert np.mean([score > 5 for score in found[20:-1]]) < 0.02


def test_one_spike_does_not_hide_the_next() -> None:
    """After a thousandfold one, one of thirty times still stands out: what was learned of the first is its bound."""
    found = scores(AboveRecentMax(), [*[1.0] * 40, 1000.0, *[1.0] * 10, 30.0])
    assert (found[40], found[51]) == pytest.approx((1000, 6))


def test_every_sample_of_a_fall_is_compared_with_those_before_it() -> None:
    """Twenty in a row, and exact zeros for as long as they last: a zero is not learned."""
    fallen = scores(BelowRecentMin(), [*[1.0] * 250, *[0.01] * 20])
    assert fallen[250:] == pytest.approx([100.0] * 20)
    zero = scores(BelowRecentMin(), [*[1.0] * 250, *[0.0] * 500, 1.0])
    assert min(zero[250:750]) > 1e20
    assert zero[-1] == pytest.approx(1)


def test_zeros_before_the_first_gradient_are_no_level() -> None:
    """A branch whose gradient is zero until it is used: the first positive ones are neither a jump nor after a fall."""
    for detector in (AboveRecentMax(warmup=5), BelowRecentMin(warmup=5, window=20, lag=2)):
        found = scores(detector, [*[0.0] * 300, *[2.0] * 60])
        assert not any(score > detector.above for score in found[300:])


def test_a_lasting_level_is_learned() -> None:
    """A hundredfold for good: told while it is new, then usual."""
    found = scores(AboveRecentMax(), [*[1.0] * 40, *[100.0] * 60])
    assert (found[40], max(found[43:])) == pytest.approx((100, 1))
    fall = scores(BelowRecentMin(), [*[300.0] * 250, *[1.0] * 300])
    assert fall[269] == pytest.approx(300)
    assert max(fall[320:]) < 10


def test_the_window_forgets() -> None:
    """All of the last 100 are a reference, and nothing that is older than 110."""
    detector = AboveRecentMax(window=100, warmup=5)
    for after, seen in ((99, 1.0), (110, 4.0)):
        found = scores(detector, [*[1.0] * 10, 4.0, *[1.0] * after, 4.0])
        assert found[-1] == pytest.approx(seen), after


def test_a_missing_sample_neither_breaches_nor_counts() -> None:
    """NaN comes out where nothing went in, and the state is as before."""
    detector = AboveRecentMax()
    state = detector.init(2)
    for _ in range(30):
        state = detector.learn(state, sample_of([1.0, 1.0]))
    score, after = detector.advance(state, sample_of([None, math.nan]))
    assert score is None or not may_breach(detector, score)
    for before, now in zip(state, after, strict=True):
        np.testing.assert_array_equal(before, now)
