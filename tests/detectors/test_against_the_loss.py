"""Kinds that hold the total norm against the loss: what each of many steps says alone, and all of them at once."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Exploded, Fade, Sample
from tests.detectors import reference
from tests.detectors.test_detectors import assert_close
from tests.support.examples import examples

STEPS = 60


def drawn(seed: int) -> list[tuple[float | None, float]]:
    """Norms and losses of some steps, with zeros, NaN and infinities, and norms that are missing."""
    rng = np.random.default_rng(seed)
    series: list[tuple[float | None, float]] = []
    for norm, loss in np.exp(rng.normal(0, 3, (STEPS, 2))).tolist():
        odd = rng.random(2) < 0.1
        other = [None, 0.0, math.nan, math.inf][int(rng.integers(4))]
        series.append(
            (
                other if odd[0] else norm,
                float(rng.choice([0.0, -1.0, math.nan, math.inf])) if odd[1] else loss,
            )
        )
    return series


@settings(max_examples=examples(50))
@given(st.integers(0, 10**6))
def test_fade_is_its_formula(seed: int) -> None:
    """The fall of the norm beyond that of the loss; many steps at once are what each is in turn."""
    detector, slow = Fade(fast=2, slow=9, warmup=3), reference.Fade(2, 9, 3)
    state = other = detector.init(1)
    for norm, loss in drawn(seed):
        told = {"loss": loss} if norm is None else {"total_norm": norm, "loss": loss}
        here = norm is not None
        sample = Sample(np.array([norm if here else 7.0]), np.array([here]), {"loss": np.array([loss])})
        score = float(detector.score(state, sample)[0])
        assert_close([score], [slow(norm, loss)], 1e-9)
        state = detector.learn(state, sample)
        below, after = detector.advance_scalars(other, [told])
        assert below or score > 0.99 * detector.above
        other = after if below else detector.learn(other, sample)
        assert [one.tobytes() for one in other] == [one.tobytes() for one in state]


@settings(max_examples=examples(50))
@given(st.integers(0, 10**6))
def test_exploded_is_its_formula(seed: int) -> None:
    """The norm over the smallest loss so far; many steps at once are what each is in turn."""
    detector, least, first = Exploded(), math.inf, None
    state = other = detector.init(1)
    for norm, loss in drawn(seed):
        here = norm is not None
        told = {"loss": loss} if norm is None else {"total_norm": norm, "loss": loss}
        sample = Sample(np.array([norm if here else 7.0]), np.array([here]), {"loss": np.array([loss])})
        if norm is not None and math.isfinite(norm) and math.isfinite(loss):
            first = abs(loss) if first is None else first
            least = min(least, max(1.0, abs(loss)))
        scale = 1.0 if first is None else least if least <= first / 2 else min(least, 10.0)
        expected = math.nan if norm is None else math.inf if math.isnan(norm) else norm / scale
        score = detector.score(state, sample)
        assert_close(score.tolist(), [expected], 1e-12)
        state = detector.learn(state, sample)
        below, after = detector.advance_scalars(other, [told])
        assert below == int(expected <= detector.threshold)
        other = after if below else detector.learn(other, sample)
        assert [field.tobytes() for field in other] == [field.tobytes() for field in state]


def test_a_summed_loss_has_large_gradients_and_has_not_exploded() -> None:
    """A norm of 5,000 beside a loss of 800: none; of 50,000, or beside a loss of 2, also of one that has grown: one.

    Nor has a norm of 50,000 exploded once the loss has fallen to half; one of 500,000 has.
    """
    for losses, norm, found in (
        ([800.0], 5e3, False),
        ([800.0, 500.0], 5e4, True),
        ([800.0, 390.0], 5e4, False),
        ([800.0, 390.0, 1e6], 5e5, True),
        ([2.0], 5e3, True),
        ([2.0, 800.0], 5e3, True),
        ([800.0], 5e4, True),
    ):
        detector = Exploded()
        steps = [{"total_norm": 1.0, "loss": loss} for loss in losses]
        below, _ = detector.advance_scalars(
            detector.init(1), [*steps, {"total_norm": norm, "loss": losses[-1]}]
        )
        assert (below <= len(losses)) is found


def test_a_loss_that_falls_explains_a_norm_that_does() -> None:
    """Both at a hundredth, of either sign: no fade; the norm alone, or with a loss that is now negative: one."""
    for loss, found in ((0.01, False), (-0.01, False), (1.0, True), (-1.0, True)):
        detector = Fade()
        _, state = detector.advance_scalars(detector.init(1), [{"total_norm": 1.0, "loss": 1.0}] * 300)
        below, _ = detector.advance_scalars(state, [{"total_norm": 0.01, "loss": loss}] * 50)
        assert (below < 50) is found
