"""A sample's distance from its level against the largest such distance of its recent past: for values of any sign."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import FLOOR, RING, HalfLife, Warmup, gain, mature
from gradwatch.detectors.detector import (
    STRICT,
    Exceeding,
    ObservedColumn,
    Sample,
    State,
    register_detector,
)
from gradwatch.detectors.recent_extremes import PARTS, Factor, Lag, Window
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.columns import scalar_name
from gradwatch.records.snapshot import BoolArray, FloatArray


class DeviationState(NamedTuple):
    """Of K series: `n` samples learned (int32, counted as far as it matters), their level `m`, the smoothed value `x`.

    The largest distance of the part of the window that is under way, and of the `parts[B, K]`, newest first; 0 = none.
    """

    n: NDArray[np.int32]
    m: NDArray[np.float64]
    x: NDArray[np.float64]
    under_way: NDArray[np.float64]
    parts: NDArray[np.float64]


class _Series(NamedTuple):
    """One of the series of a `DeviationState`, in plain numbers."""

    n: int
    m: float
    x: float
    under_way: float
    parts: Sequence[float]


class _After(NamedTuple):
    """A series after some `steps`; `score` of the last one, NaN where it is not judged."""

    steps: int
    series: _Series
    score: float


class _Sizes(NamedTuple):
    """Samples of a `part`, `parts` of the window, `late` newer ones not compared with; samples count up to `most`."""

    part: int
    parts: int
    late: int
    most: int


@register_detector
@dataclass(frozen=True, slots=True)
class AboveRecentDeviation(Exceeding):
    """abs(x - m) > above x the largest of the last `window` samples, each from the level m at its time.

    m is an exponential mean, and x the sample, or with `smooth` its mean over that half-life. Where a value
    scatters, ten times a small one may be less than twice the largest, but is far off; and a value may be negative:
    what rises is judged, and below 0 what falls as well, unless it is smoothed. A value that falls and stays
    positive is not. A distance counts as a tenth of the level at least; a series without any, a constant, is not
    judged. The window ends `lag` samples before this one (0: at the one before), is kept in tenths, and holds up to
    a tenth more. A sample of exactly 0 is neither judged nor learned. A distance is learned up to `above` times the
    largest, and no sample moves the smoothed value by more than half of that. Default: four times the largest of
    100, judged from the 50th sample on.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ClassVar[str] = "above_recent_deviation"
    has_baseline: ClassVar[bool] = True

    of: Literal["loss"] | ObservedColumn = "loss"
    above: Factor = 4.0
    clear_below: Positive | None = None
    window: Window = 100
    lag: Lag = 0
    smooth: HalfLife | None = None
    half_life: HalfLife = field(default=20, metadata={"rule_key": True})
    warmup: Warmup = field(default=50, metadata={"rule_key": True})

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline; what is learned depends on the threshold, too."""
        return (self.kind, self.above, self.window, self.lag, self.smooth, self.half_life, self.warmup)

    def exceeded(self, score: FloatArray) -> FloatArray:
        """As logarithms: 1 at `above`."""
        with np.errstate(divide="ignore"):
            return np.log(score) / math.log(self.above)

    def in_words(self, score: float) -> str:
        """The factor over the largest distance."""
        return f"{score:.4g} times as far from its level as any of the last {self.window}"

    def init(self, size: int) -> DeviationState:
        """No sample seen."""
        sizes = _sizes(self.window, self.lag, self.half_life, self.warmup)
        parts = np.zeros((sizes.parts + sizes.late, size))
        m, x, under_way = np.zeros((3, size))
        return DeviationState(np.zeros(size, np.int32), m, x, under_way, parts)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor; NaN while warming up, and for a sample that is missing, 0 or not finite."""
        series = _with_values(cast(DeviationState, state), sample)
        return np.array([self._after(before, (value,), math.inf).score for before, value in series])

    def learn(self, state: State, sample: Sample) -> DeviationState:
        """Move the level, and keep the distance, up to the bound."""
        series = _with_values(cast(DeviationState, state), sample)
        return _together([self._after(before, (value,), math.inf).series for before, value in series])

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """As `advance` of each, in plain floats, up to one that breaches."""
        before = cast(DeviationState, state)
        if len(before.n) != 1:
            return 0, state
        name = scalar_name(self.of)
        values = [one.get(name, math.nan) for one in steps]
        m, x, under_way = before.m.item(), before.x.item(), before.under_way.item()
        series = _Series(before.n.item(), m, x, under_way, before.parts[:, 0].tolist())
        count, (n, m, x, under_way, parts), _ = self._after(series, values, self.above)
        if not count:
            return 0, state
        kept = before.parts if parts is series.parts else np.array(parts)[:, None]
        about = np.array([n], np.int32), np.array([m]), np.array([x]), np.array([under_way])
        return count, DeviationState(*about, kept)

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> DeviationState:
        """Start over; a level across a change that keeps judging goes on."""
        before = cast(DeviationState, state)
        if keep_judging:
            return before
        return DeviationState(*(np.where(mask, np.zeros(1, one.dtype), one) for one in before))

    def _after(self, series: _Series, values: Iterable[float], most: float) -> _After:
        """The series after the first of these values that do not breach `most`.

        In one loop, without a call: it is run at every step.
        """
        part, _, late, counted = _sizes(self.window, self.lag, self.half_life, self.warmup)
        follow = 1.0 if self.smooth is None else gain(self.smooth)
        steady, warmup, above, lag = gain(self.half_life), self.warmup, self.above, self.lag
        n, m, x, under_way, parts = series
        largest, count, score = max(parts[late:]), 0, math.nan
        for value in values:
            score = math.nan
            if -math.inf < value < math.inf and value != 0:
                reference = largest if lag or largest > under_way else under_way
                learned, bound = value, math.inf
                now = x + follow * (value - x) if n and follow < 1.0 else value
                if reference:
                    reference = max(reference, FLOOR * abs(m))
                    bound = above * reference if n >= RING else math.inf
                    if follow < 1.0:
                        moved = max(-bound / 2, min(now - x, bound / 2))
                        learned, now = x + moved / follow, x + moved
                    if n >= warmup:
                        judged = now > m or (value < 0 and follow == 1.0)
                        score = abs(now - m) / reference if judged else 0.0
                        if score > most:
                            break
                distance = now - m
                if follow == 1.0:
                    learned = m + max(-bound, min(distance, bound))
                if n:
                    under_way = max(under_way, min(abs(distance), bound))
                m += max(steady, 1.0 / (n + 1.0)) * (learned - m)
                x = now
                n = n + 1 if n + 1 < counted else n + 1 - part
                if n % part == 0:
                    parts, under_way = (under_way, *parts[:-1]), 0.0
                    largest = max(parts[late:])
            count += 1
        return _After(count, _Series(n, m, x, under_way, parts), score)


@cache
def _sizes(window: int, lag: int, half_life: int, warmup: int) -> _Sizes:
    part = -(-window // PARTS)
    enough = mature(half_life, warmup)
    return _Sizes(part, -(-window // part), -(-lag // part), (-(-enough // part) + 1) * part)


def _with_values(state: DeviationState, sample: Sample) -> Iterable[tuple[_Series, float]]:
    """Each series with its value, NaN where there is none."""
    values = np.where(sample.present, sample.values.astype(np.float64), np.nan).tolist()
    yield from zip(_apart(state), values, strict=True)


def _apart(state: DeviationState) -> list[_Series]:
    """Each of the series."""
    parts = state.parts.T.tolist()
    return [_Series(*one) for one in zip(*(array.tolist() for array in state[:-1]), parts, strict=True)]


def _together(series: Sequence[_Series]) -> DeviationState:
    """The state of these series."""
    n, m, x, under_way, parts = zip(*series, strict=True)
    return DeviationState(
        np.array(n, np.int32), np.array(m), np.array(x), np.array(under_way), np.array(parts).T.copy()
    )
