"""The mean of ln value against the largest such mean a while before: the formula, many at once, growth, outliers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Drift, Spike, may_breach
from tests.detectors import reference
from tests.detectors.test_detectors import as_float32, assert_close, scores, values_of_one_series
from tests.support.examples import examples


@settings(max_examples=examples(100))
@given(values_of_one_series, st.integers(1, 9), st.integers(1, 20), st.integers(0, 12), st.integers(1, 30))
def test_the_score_is_its_formula(
    series: list[float | None], fast: int, window: int, lag: int, warmup: int
) -> None:
    """With holes, zeros, NaN and outliers of a factor of a million, windows that no ten parts fill included."""
    slow = reference.Drift(3.0, fast, window, lag, warmup)
    detector = Drift(above=3.0, fast=fast, window=window, lag=lag, warmup=warmup)
    found, expected = scores(detector, series), [slow(value) for value in as_float32(series)]
    assert_close(np.log(found).tolist(), np.log(expected).tolist(), 1e-3)


@settings(max_examples=examples(200))
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 30), st.integers(1, 40), st.integers(1, 4))
def test_many_steps_are_judged_as_one_at_a_time(
    seed: int, window: int, lag: int, fast: int, size: int
) -> None:
    """Up to the first that breaches anywhere, bit by bit in the state."""
    rng = np.random.default_rng(seed)
    detector = Drift(window=window, lag=lag, warmup=30, fast=fast, above=float(rng.choice([1.2, 2.0])))
    x = rng.normal(0, 0.3, (int(rng.integers(1, 160)), size)).astype(np.float32)
    x += rng.choice([0.0, 0.01]) * np.arange(len(x), dtype=np.float32)[:, None]
    x[rng.random(x.shape) < 0.01] += float(rng.choice([-9.0, 9.0]))
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


def test_growth_of_a_per_cent_a_step_is_seen_where_z_sees_nothing() -> None:
    """Scatter by a factor of 1.6: found before the level is thirty times what it was, without an alarm before."""
    rng = np.random.default_rng(0)
    series = np.exp(rng.normal(0, 0.5, 942) + 0.01 * np.maximum(0, np.arange(942) - 600)).tolist()
    assert not max(scores(Spike(), series)[100:]) > 6
    found = np.array(scores(Drift(), series))
    assert 800 < int(np.argmax(found > 5)) < 942


def test_a_single_outlier_is_no_drift() -> None:
    """A billion times the usual, once: the level moves by a fifth of a nat, as of twenty times the usual."""
    found = scores(Drift(), [*[1.0] * 500, 1e9, *[1.0] * 50])
    assert max(found[500:]) < 1.3
