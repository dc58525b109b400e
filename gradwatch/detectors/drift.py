"""Slow growth of one series: what a spike detector, whose baseline climbs along, cannot see."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import (
    LARGEST_EXPONENT,
    Array32,
    HalfLife,
    Warmup,
    common_pace,
    common_paces,
    gain,
    leading,
    log_of,
    logs_of_scalars,
    mature,
)
from gradwatch.detectors.detector import (
    STRICT,
    Exceeding,
    NormColumn,
    ObservedColumn,
    Sample,
    State,
    register_detector,
)
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.snapshot import BoolArray, FloatArray


@cache
def _gains(fast: float, slow: float) -> Array32:
    """float32[2, 1]: the weights of a new sample in the two means."""
    return np.array([[gain(fast)], [gain(slow)]], np.float32)


class TrendState(NamedTuple):
    """`n` samples learned (int32, counted as far as it matters); `means[2, K]`: fast, slow, of ln value."""

    n: NDArray[np.int32]
    means: Array32


@register_detector
@dataclass(frozen=True, slots=True)
class Drift(Exceeding):
    """exp(EW_fast(x) - EW_slow(x)) > above, with x = ln value: the recent level over the long-term one.

    Sees steady growth that `spike` is blind to (up to 5 % a step); slower to a single jump. The present
    sample is included. It has no limit on purpose: no single value can be said to be the cause. Of an observed value
    only positive ones are judged.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ClassVar[str] = "drift"
    takes_logs: ClassVar[bool] = True
    has_baseline: ClassVar[bool] = True

    of: NormColumn | ObservedColumn = "total_norm"
    above: Positive = 10.0
    clear_below: Positive | None = None
    fast: HalfLife = 10
    slow: HalfLife = 500
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    def __post_init__(self) -> None:
        Exceeding.__post_init__(self)
        if self.fast >= self.slow:
            raise ValueError("fast must be shorter than slow")

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline, which does not depend on the threshold."""
        return (self.kind, self.fast, self.slow, self.warmup)

    def init(self, size: int) -> TrendState:
        """No sample seen."""
        return TrendState(np.zeros(size, np.int32), np.zeros((2, size), np.float32))

    def learn(self, state: State, sample: Sample) -> TrendState:
        """Move both means; the first samples are averaged plainly."""
        return self._absorb(cast(TrendState, state), log_of(sample))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor, this sample included; NaN while warming up, and for a missing or non-finite sample."""
        before, x = cast(TrendState, state), log_of(sample)
        return self._factor(before, self._absorb(before, x), x)

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`, learning once."""
        before, x = cast(TrendState, state), log_of(sample)
        return self._judged(before, self._absorb(before, x), x)

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance`, without masks while all series have learned equally often."""
        before = cast(TrendState, state)
        if len(x) == 1:
            below, after = self._of_one(before, x)
            if below:
                return None, after
        n, means = before
        pace = common_pace(n, 0, self.slow, mature(self.slow, self.warmup))
        if pace is None:
            return self._judged(before, self._absorb(before, x), x)
        gains = _gains(self.fast, self.slow)
        if pace[1] is not n:
            gains = np.maximum(gains, pace[0])
        moved = x - means
        moved *= gains
        moved += means
        return self._judged(before, TrendState(pace[1], moved), x)

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn; only what depends on the sample before is done for one at a time."""
        before = cast(TrendState, state)
        if x.shape[1] == 1:
            return self._of_one(before, x[:, 0])
        paces = common_paces(before.n, 0, self.slow, mature(self.slow, self.warmup), len(x))
        if paces is None:
            return Exceeding.advance_many_logs(self, state, x)
        gains, means, n = _gains(self.fast, self.slow), before.means, before.n
        found = np.empty((len(x), *means.shape), np.float32)
        for new, weight, after, moved in zip(x, *paces, found, strict=True):
            np.subtract(new, means, out=moved)
            moved *= gains if after is n else np.maximum(gains, weight)
            moved += means
            means, n = moved, after
        growth = np.maximum.reduce(found[:, 0] - found[:, 1], axis=1)
        # What comes closer is judged by itself.
        below = leading(growth.astype(np.float64) < self.log_surely_below)
        return below, TrendState(paces[1][below - 1], found[below - 1].copy()) if below else state

    def _of_one(self, before: TrendState, x: Array32) -> tuple[int, TrendState]:
        """As `advance_many_logs` of x[T] of a single series, in plain floats as `spike`; ends at NaN, too."""
        enough, n = mature(self.slow, self.warmup), int(before.n[0])
        fast_gain, slow_gain = _gains(self.fast, self.slow)[:, 0].tolist()
        (fast,), (slow,) = before.means.tolist()
        lowest, below = self.log_surely_below, 0
        cell = array("f", (0.0,))  # what is put into it is rounded to float32
        for value in x.tolist():
            cell[0] = 0.0 if n >= enough else 1.0 / (n + 1.0)
            least = cell[0]
            cell[0] = value - fast
            cell[0] = cell[0] * max(fast_gain, least)
            cell[0] = cell[0] + fast
            new_fast = cell[0]
            cell[0] = value - slow
            cell[0] = cell[0] * max(slow_gain, least)
            cell[0] = cell[0] + slow
            new_slow = cell[0]
            cell[0] = new_fast - new_slow
            if not -math.inf < cell[0] < lowest:
                break
            fast, slow, n, below = new_fast, new_slow, min(n + 1, max(n, enough)), below + 1
        if not below:
            return 0, before
        counts = before.n if n == before.n[0] else np.array([n], np.int32)
        return below, TrendState(counts, np.array([[fast], [slow]], np.float32))

    def _judged(
        self, before: TrendState, after: TrendState, x: Array32
    ) -> tuple[FloatArray | None, TrendState]:
        growth = after.means[0] - after.means[1]
        # A margin covers the rounding of float32 and of exp.
        if float(np.maximum.reduce(growth)) < self.log_surely_below:
            return None, after
        return self._factor(before, after, x), after

    def _absorb(self, before: TrendState, x: Array32) -> TrendState:
        n, means = before
        gains, enough = _gains(self.fast, self.slow), mature(self.slow, self.warmup)
        known = np.isfinite(x)
        gains = np.maximum(gains, (1.0 / (n + 1.0)).astype(np.float32))
        toward: Array32 = np.where(known, x, means)
        return TrendState(np.minimum(n + known, enough).astype(np.int32), means + gains * (toward - means))

    def _factor(self, before: TrendState, after: TrendState, x: Array32) -> NDArray[np.float64]:
        growth = after.means[0].astype(np.float64) - after.means[1]
        factor = np.exp(np.minimum(growth, LARGEST_EXPONENT))
        return np.where((before.n >= self.warmup) & np.isfinite(x), factor, np.nan)

    def logs_of(self, values: Sequence[float]) -> Array32 | None:
        """ln of each; None where one is not positive."""
        return logs_of_scalars(values) if min(values) > 0 else None

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> TrendState:
        """Start over; a trend across a change that keeps judging goes on."""
        n, means = cast(TrendState, state)
        if keep_judging:
            return TrendState(n, means)
        return TrendState(np.where(mask, 0, n).astype(np.int32), np.where(mask, np.float32(0), means))
