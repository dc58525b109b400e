"""`converged`: a loss that has come down, for good, to a small part of what it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Converged, Sample, State, breaches
from tests.support.examples import examples

losses = st.one_of(
    st.floats(0, 1e30), st.sampled_from([0.0, 1e-300, 1e-12, 1.0, 1e300, -1.0, math.nan, math.inf])
)


def sample(*values: float) -> Sample:
    """One step, all present."""
    return Sample(np.array(values, np.float64), np.ones(len(values), np.bool_))


def firing(values: list[float], **keys: float) -> list[bool]:
    """Whether each of these breaches, one after the other."""
    detector, found = Converged(**keys), []  # type: ignore[arg-type]
    state: State = detector.init(1)
    for value in values:
        score, state = detector.advance(state, sample(value))
        assert score is not None
        found.append(bool(breaches(detector, score)[0]))
    return found


def test_a_loss_that_converges_has_settled() -> None:
    """From where level and sample are 1e5 times below what it was; a batch that is not so small is judged."""
    falling = [math.exp(-0.05 * step) for step in range(600)]
    found = firing(falling)
    assert not any(found[: int(math.log(1e5) / 0.05)])
    assert all(found[350:])
    assert firing([*falling, 0.01])[-1] is False


@pytest.mark.parametrize("by", [1e-2, 1e-6, 0.0])
def test_a_loss_that_falls_at_once_has_not_for_a_hundred_steps(by: float) -> None:
    """By when the rules on falls have judged it: a factor that is wrong is no convergence."""
    found = firing([1.0] * 200 + [by] * 200)
    assert not any(found[:300])
    assert found[-1] == (by < 1e-5)


def test_a_floor_of_noise_is_steady_however_far_down() -> None:
    """Targets that are not normalised: rules on levels know what is usual there, and judge what a fault makes of it."""
    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0, 0.2, 2000))
    losses = [1e7 * math.exp(-0.1 * step) + 0.1 for step in range(2000)] * noise
    found = firing(losses.tolist())
    assert any(found[:300])
    assert not any(found[700:])
    for by in (1e-7, 0.0, 1e-3):
        assert not any(firing([*losses.tolist(), *(by * losses[-40:])])[-40:]), by


def test_one_spike_is_no_level() -> None:
    """A loss of 1e6 at one step, as of a broken batch, does not make what is usual next to nothing."""
    assert not any(firing([1.0] * 100 + [1e8] + [1.0] * 500))


def test_a_transient_of_the_start_is_no_level() -> None:
    """The first steps may be thousands of times off: that is not 1e5 yet."""
    assert not any(firing([1e4 * math.exp(-0.3 * step) + 1 for step in range(500)]))


@settings(max_examples=examples(100))
@given(st.lists(losses, max_size=80), st.integers(1, 30), st.integers(1, 40), st.integers(0, 79))
def test_many_at_once_are_as_one_at_a_time(
    values: list[float], warmup: int, half_life: int, cut: int
) -> None:
    """Bit by bit, as far as no sample comes close to the threshold; what is negative or not finite is no sample."""
    detector = Converged(above=10.0, warmup=warmup, half_life=half_life)
    state: State = detector.init(1)
    for value in values[:cut]:
        state = detector.learn(state, sample(value))
    rest = [value for value in values[cut:] if 0 <= value < math.inf]
    if not rest:
        return
    x = detector.logs_of(rest)
    assert x is not None
    count, together = detector.advance_many_logs(state, x[:, None])
    for t, value in enumerate(rest[:count]):
        score, by_log = detector.advance_logs(state, x[t : t + 1])
        plain, state = detector.advance(state, sample(value))
        assert plain is not None
        assert not breaches(detector, plain)[0]
        assert score is None or (score == plain).all() or np.isnan(plain).all()
        assert all((one == other).all() for one, other in zip(by_log, state, strict=True))
    assert all((one == other).all() for one, other in zip(together, state, strict=True))


def test_what_is_no_sample_changes_nothing() -> None:
    """Missing, negative, not finite."""
    detector = Converged()
    state = detector.learn(detector.init(1), sample(2.0))
    for value in (-1.0, math.nan, math.inf):
        score, after = detector.advance(state, sample(value))
        assert score is not None
        assert np.isnan(score).all()
        assert all((one == other).all() for one, other in zip(after, state, strict=True))
    assert detector.logs_of([1.0, -1.0]) is None


@pytest.mark.parametrize("keep", [True, False])
def test_a_new_baseline(keep: bool) -> None:
    """Begun on purpose it knows no largest level any more; a jump of the learning rate leaves it."""
    detector = Converged()
    state: State = detector.init(1)
    for _ in range(50):
        state = detector.learn(state, sample(5.0))
    after = detector.rebaseline(state, np.array([True]), keep)
    assert (after == state) == keep
    assert bool(np.isfinite(detector.score(after, sample(1e-9)))[0]) == keep
