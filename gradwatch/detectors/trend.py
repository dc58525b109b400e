"""Slow growth of one series: what a spike detector, whose baseline climbs along, cannot see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.constant import Positive
from gradwatch.detectors.detector import STRICT, Detector, NormColumn, Sample, State, register_detector
from gradwatch.detectors.level import Array32, HalfLife, Warmup, check_clear, gain, log_of
from gradwatch.snapshot import BoolArray


class TrendState(NamedTuple):
    """`n` samples learned (int32, counted as far as it matters); `fast`, `slow`: EW means of ln value."""

    n: NDArray[np.int32]
    fast: Array32
    slow: Array32


@register_detector
@dataclass(frozen=True, slots=True)
class Drift(Detector):
    """exp(EW_fast(x) - EW_slow(x)) > above, with x = ln value: the recent level over the long-term one.

    Sees steady growth that `spike` is blind to (up to 5 % a step); slower to a single jump. The present
    sample is included. It has no limit on purpose: no single value can be said to be the cause.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ClassVar[str] = "drift"
    has_baseline: ClassVar[bool] = True

    of: NormColumn = "total_norm"
    above: Positive = 10.0
    clear_below: Positive | None = None
    fast: HalfLife = 10
    slow: HalfLife = 500
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    def __post_init__(self) -> None:
        check_clear(self.clear_below, self.above)
        if self.fast >= self.slow:
            raise ValueError("fast must be shorter than slow")

    @property
    def fires_at(self) -> float:
        """`above`, a factor."""
        return self.above

    @property
    def clears_at(self) -> float:
        """`clear_below`, or `above`."""
        return self.above if self.clear_below is None else self.clear_below

    def baseline_key(self) -> tuple[Any, ...]:
        """What is learned does not depend on the threshold."""
        return (self.kind, self.fast, self.slow, self.warmup)

    def init(self, size: int) -> TrendState:
        """No sample seen."""
        zeros = np.zeros(size, np.float32)
        return TrendState(np.zeros(size, np.int32), zeros, zeros)

    def learn(self, state: State, sample: Sample) -> TrendState:
        """Move both means; the first samples are averaged plainly."""
        n, fast, slow = TrendState(*state)
        x = log_of(sample)
        known = ~np.isnan(x)
        start = 1.0 / (n + 1.0)
        return TrendState(
            np.minimum(n + known, max(self.warmup, round(2 * self.slow))).astype(np.int32),
            _toward(fast, x, known, np.maximum(gain(self.fast), start)),
            _toward(slow, x, known, np.maximum(gain(self.slow), start)),
        )

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor, this sample included; NaN while warming up, and for a missing or non-finite sample."""
        return self._factor(TrendState(*state), self.learn(state, sample), sample)

    def advance(self, state: State, sample: Sample) -> tuple[NDArray[np.float64], State]:
        """As `score` and `learn`, learning once."""
        after = self.learn(state, sample)
        return self._factor(TrendState(*state), after, sample), after

    def _factor(self, before: TrendState, after: TrendState, sample: Sample) -> NDArray[np.float64]:
        usable = sample.present & (sample.values > 0) & (sample.values < np.inf) & (before.n >= self.warmup)
        growth = np.minimum(after.fast.astype(np.float64) - after.slow, 700.0)  # e^700 is still a float64
        return np.where(usable, np.exp(growth), np.nan)

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> TrendState:
        """Start over; a trend across a change that keeps judging goes on."""
        if keep_judging:
            return TrendState(*state)
        n, fast, slow = TrendState(*state)
        zero = np.float32(0)
        return TrendState(
            np.where(mask, 0, n).astype(np.int32), np.where(mask, zero, fast), np.where(mask, zero, slow)
        )


def _toward(mean: Array32, x: Array32, known: BoolArray, a: NDArray[np.float64]) -> Array32:
    moved: Array32 = np.where(known, mean + a.astype(np.float32) * (x - mean), mean)
    return moved
