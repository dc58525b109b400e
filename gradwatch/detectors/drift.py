"""Slow growth of one series: what a spike detector, whose baseline climbs along, cannot see."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import (
    RING,
    Array32,
    HalfLife,
    Warmup,
    gain,
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
from gradwatch.detectors.recent_extremes import AboveRecentMax, Factor, Lag, RecentState, Window
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.snapshot import BoolArray, FloatArray

HIGHEST = 3.0
"""A sample moves the mean as one that is this far above it at most, in nats: twenty times as large."""
_HIGHEST = np.float32(HIGHEST)


class MeanState(NamedTuple):
    """Of K series: `learned` samples (int32, counted as far as the mean needs it), the mean of ln value, past means.

    The last four are a `RecentState` of the means: `n` counts the samples of the warm-up.
    """

    learned: NDArray[np.int32]
    mean: Array32
    n: NDArray[np.int32]
    under_way: Array32
    parts: Array32
    compared: Array32


@register_detector
@dataclass(frozen=True, slots=True)
class Drift(Exceeding):
    """The recent level is far above the highest it was some hundred samples before.

    x = ln value, m = EW_fast(x), this sample included; the score is exp(m - the largest m of `window` samples), of
    which the last is `lag` samples old. Sees steady growth that `spike` is blind to (0.7 % a step and more, by
    default); slower to a single jump. Means do not scatter as samples do, and the largest of them is no lower than what
    a series comes back to. A sample moves the mean as 20 times the mean at most. It has no limit on purpose: no single
    value can be said to be the cause. Only positive values are judged. Default: five times, from the 400th sample on.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "drift"
    takes_logs: ClassVar[bool] = True
    has_baseline: ClassVar[bool] = True

    of: NormColumn | ObservedColumn | Literal["loss"] = "total_norm"
    above: Factor = 5.0
    clear_below: Positive | None = None
    fast: HalfLife = 10
    window: Window = 160
    lag: Lag = 240
    warmup: Warmup = field(default=400, metadata={"rule_key": True})

    @property
    def samples_needed(self) -> int:
        """The warm-up, or what it takes until a part of the window is `lag` samples old."""
        return self._extremes().samples_needed

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline; what is learned depends on the threshold, too."""
        return (self.kind, self.above, self.fast, self.window, self.lag, self.warmup)

    def in_words(self, score: float) -> str:
        """The factor over the highest level."""
        return f"on a level {score:.4g} times the highest it was {self.lag} samples and more before"

    def init(self, size: int) -> MeanState:
        """No sample seen."""
        return MeanState(np.zeros(size, np.int32), np.zeros(size, np.float32), *self._extremes().init(size))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor, this sample included; NaN while warming up, and for a missing or non-finite sample."""
        before, x = cast(MeanState, state), log_of(sample)
        mean = self._moved(before, x)[1]
        return self._extremes().score_logs(_extremes_of(before), _where_finite(x, mean))

    def learn(self, state: State, sample: Sample) -> MeanState:
        """Move the mean, and keep the largest."""
        return self._advanced(cast(MeanState, state), log_of(sample))[1]

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`, learning once."""
        return self._advanced(cast(MeanState, state), log_of(sample))

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance`, of ln value."""
        return self._advanced(cast(MeanState, state), x)

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn; only the mean is moved for one at a time."""
        before = cast(MeanState, state)
        if int(np.minimum.reduce(before.learned)) < mature(self.fast, RING):
            return Exceeding.advance_many_logs(self, state, x)
        means = self._means(before, x)
        extremes = _of_means(self.above, self.window, self.lag, self.warmup)
        count, after = extremes.advance_many_logs(
            RecentState(*before[2:]), means
        )  # no call of ours that can be spared
        return count, MeanState(before.learned, means[count - 1].copy(), *after) if count else state

    def logs_of(self, values: Sequence[float]) -> Array32 | None:
        """ln of each; None where one is not positive."""
        return logs_of_scalars(values) if min(values) > 0 else None

    def level(self, state: State) -> NDArray[np.float64]:
        """The highest level it was; 0 where there is none yet."""
        return self._extremes().level(_extremes_of(cast(MeanState, state)))

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> MeanState:
        """Start over; a trend across a change that keeps judging goes on."""
        before = cast(MeanState, state)
        if keep_judging:
            return before
        n, mean = (
            np.where(mask, 0, before.learned).astype(np.int32),
            np.where(mask, np.float32(0), before.mean),
        )
        return MeanState(n, mean, *self._extremes().rebaseline(_extremes_of(before), mask, keep_judging))

    def _extremes(self) -> AboveRecentMax:
        """The comparison of a mean with those before it."""
        return _of_means(self.above, self.window, self.lag, self.warmup)

    def _advanced(self, before: MeanState, x: Array32) -> tuple[FloatArray | None, MeanState]:
        n, mean = self._moved(before, x)
        score, extremes = self._extremes().advance_logs(_extremes_of(before), _where_finite(x, mean))
        return score, MeanState(n, mean, *extremes)

    def _moved(self, before: MeanState, x: Array32) -> tuple[NDArray[np.int32], Array32]:
        """The counts and the means after x[K]; not finite = nothing. The first samples are averaged plainly."""
        n, mean, enough = before.learned, before.mean, mature(self.fast, RING)
        if int(np.minimum.reduce(n)) >= enough and math.isfinite(float(np.add.reduce(x))):
            return n, self._means(before, x[None])[0]
        known, bound = np.isfinite(x), np.where(n < RING, np.inf, HIGHEST)
        away = np.minimum(np.where(known, x, mean) - mean, bound).astype(np.float32)
        weight = np.maximum(gain(self.fast), 1.0 / (n + 1.0)).astype(np.float32)
        return np.minimum(n + known, enough).astype(np.int32), np.where(known, mean + weight * away, mean)

    def _means(self, before: MeanState, x: Array32) -> Array32:
        """float32[T, K]: the mean after each of x[T, K], all of them finite, where no series is young."""
        found, mean, weight = np.empty_like(x), before.mean, np.float32(gain(self.fast))
        if x.shape[1] == 1:  # in plain floats, as `spike`: each result rounded to float32
            cell, one, share = array("f", mean.tolist()), array("f"), float(weight)
            for value in x[:, 0].tolist():
                usual = cell[0]
                cell[0] = value - usual
                cell[0] = (cell[0] if cell[0] < HIGHEST else HIGHEST) * share
                cell[0] = cell[0] + usual
                one.append(cell[0])
            found[:, 0] = one
            return found
        for new, moved in zip(x, found, strict=True):
            np.subtract(new, mean, out=moved)
            np.minimum(moved, _HIGHEST, out=moved)
            moved *= weight
            moved += mean
            mean = moved
        return found


@cache
def _of_means(above: float, window: int, lag: int, warmup: int) -> AboveRecentMax:
    """Compares a mean with the largest of those before it."""
    return AboveRecentMax(above=above, window=window, lag=lag, warmup=warmup)


def _extremes_of(state: MeanState) -> RecentState:
    return RecentState(*state[2:])


def _where_finite(x: Array32, mean: Array32) -> Array32:
    """mean[K], NaN where x is not finite."""
    known = np.isfinite(x)
    return mean if known.all() else np.where(known, mean, np.float32(np.nan))
