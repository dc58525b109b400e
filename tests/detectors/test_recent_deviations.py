"""Distances from the level against those of a window before: the formula, many at once, what a largest value hides."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import AboveRecentDeviation, AboveRecentMax
from tests.detectors import reference
from tests.detectors.test_detectors import as_float32, assert_close, scores, values_of_one_series
from tests.support.examples import examples


def scattered(step: int, level: float = 0.0) -> float:
    """A healthy loss that is now a tenth of the largest and now the largest."""
    return level + (0.1, 1.0, 0.3, 0.15)[step % 4]


@settings(max_examples=examples(100))
@given(
    values_of_one_series,
    st.integers(1, 40),
    st.sampled_from([0, 7]),
    st.sampled_from([None, 3]),
    st.integers(1, 9),
    st.integers(1, 30),
    st.booleans(),
)
def test_the_score_is_its_formula(
    series: list[float | None],
    window: int,
    lag: int,
    smooth: int | None,
    half_life: int,
    warmup: int,
    flipped: bool,
) -> None:
    """With holes, zeros, NaN, both signs and outliers; many steps at once are what each is in turn."""
    plain = [-v if v is not None and flipped and k % 3 else v for k, v in enumerate(as_float32(series))]
    detector = AboveRecentDeviation(
        above=3.0, window=window, lag=lag, smooth=smooth, half_life=half_life, warmup=warmup
    )
    slow = reference.RecentDeviation(3.0, window, lag, smooth, half_life, warmup)
    found, expected = scores(detector, plain), [slow(value) for value in plain]
    assert_close(found, expected, 1e-9)
    state = detector.init(1)
    steps = [{} if value is None else {"loss": value} for value in plain]
    first = next((k for k, score in enumerate(found) if score > 3), len(plain))
    assert detector.advance_scalars(state, steps)[0] == first
    whole = detector.advance_scalars(state, steps[:first])[1]
    for step in steps[:first]:
        passed, state = detector.advance_scalars(state, [step])
        assert passed == 1
    assert [one.tobytes() for one in whole] == [one.tobytes() for one in state]


def test_a_small_loss_times_ten_is_seen_beside_a_large_one() -> None:
    """Ten times a small loss is 1.5 times the largest, and many times as far off as any."""
    calm = [3.0 + scattered(step) for step in range(200)]
    assert scores(AboveRecentMax(of="loss"), [*calm, 7.5])[-1] < 2
    assert scores(AboveRecentDeviation(), [*calm, 7.5])[-1] > 5


def test_a_negative_loss_is_judged_both_ways() -> None:
    """A log density times ten falls, and one that diverges rises; a positive loss that falls is no matter."""
    calm = [scattered(step, -3.0) for step in range(200)]
    assert scores(AboveRecentDeviation(), [*calm, -25.0])[-1] > 10
    assert scores(AboveRecentDeviation(), [*calm, 25.0])[-1] > 10
    assert scores(AboveRecentDeviation(), [*map(abs, calm), 1e-3])[-1] == 0
    assert not any(score > 4 for score in scores(AboveRecentDeviation(), [*calm])[50:])


def test_a_loss_that_hardly_moves_may_move_by_a_third() -> None:
    """A tenth of the level is the least that four times are taken of; a constant has no distances at all."""
    steady = [1.0 + 1e-6 * (step % 2) for step in range(100)]
    assert scores(AboveRecentDeviation(), [*steady, 1.35])[-1] < 4
    assert scores(AboveRecentDeviation(), [*steady, 1.45])[-1] > 4
    assert math.isnan(scores(AboveRecentDeviation(), [1.0] * 100 + [9.0])[-1])


def test_one_spike_does_not_hide_the_next() -> None:
    """After a thousandfold one, one of fifty times still stands out: what was learned of the first is its bound."""
    calm = [scattered(step) for step in range(100)]
    found = scores(AboveRecentDeviation(), [*calm, 1000.0, *calm[:40], 50.0])
    assert found[100] > 1000
    assert found[-1] > 8
    after = [scores(AboveRecentDeviation(), [*calm, spike, 12.0])[-1] for spike in (1e3, 1e17)]
    assert after[0] == after[1]


def test_rewards_that_come_rarely_are_no_jumps() -> None:
    """A loss of exactly 0, an episode without a reward, teaches no level: what comes between is as it was."""
    calm = [scattered(step) if step % 50 == 0 else 0.0 for step in range(6000)]
    found = np.array(scores(AboveRecentDeviation(), calm))
    assert np.nanmax(found) < 2


def test_a_loss_that_rises_for_good_is_seen_where_it_scatters() -> None:
    """Eight times as large from some step on, where single ones are as large before: seen by its mean, in ten steps."""
    detector = AboveRecentDeviation(above=2.0, lag=20, smooth=5)
    calm = np.exp(np.random.default_rng(0).normal(0, 1, 240))
    found = scores(detector, [*calm[:200], *8 * calm[200:]])
    assert max(found[80:200]) < 2
    assert min(found[208:216]) > 2


def test_a_single_spike_does_not_move_the_smoothed_loss_far() -> None:
    """One sample moves it by half of what breaches, however large; a negative loss that falls for good is no matter."""
    detector = AboveRecentDeviation(above=2.0, lag=20, smooth=5)
    calm = [scattered(step) for step in range(200)]
    assert max(scores(detector, [*calm, 1e9, *calm[:100]])[50:]) < 2
    falling = [scattered(step, -3.0) - (step > 200) * 9 for step in range(240)]
    assert max(scores(detector, falling)[200:]) < 2
