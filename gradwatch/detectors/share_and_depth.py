"""One site against the others: a share of the whole that shrinks, and norms that fade with depth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

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
    mature,
)
from gradwatch.detectors.detector import (
    STRICT,
    Comparison,
    Detector,
    Exceeding,
    Sample,
    Scope,
    State,
    register_detector,
)
from gradwatch.detectors.limits import Limits
from gradwatch.detectors.thresholds import Dimensions, Positive
from gradwatch.records.snapshot import BoolArray, FloatArray

ZERO_NORM = 1e-30
"""A norm of exactly zero counts as this, so that a gradient that vanishes completely is a fall too."""
STEP = 0.5
"""Largest deviation in nats that the share's baseline learns from."""
_FALL, _RISE = np.float32(-STEP), np.float32(STEP)


class ShareState(NamedTuple):
    """`n` samples learned (int32, counted only as far as it matters); `b` the usual ln share of K series."""

    n: NDArray[np.int32]
    b: Array32


@register_detector
@dataclass(frozen=True, slots=True)
class Drop(Exceeding):
    """A parameter's share of the model falls: vanishing that an absolute bound cannot see.

    y = ln norm_i - median_j ln norm_j over the selected tensors (a norm of 0 counts as 1e-30); b +=
    a·clip(y - b, ±0.5) with a = max(1 - 2^(-1/half_life), 1/(n + 1)), clipped after the warm-up. The score
    is exp(b - y), how many times smaller than usual; default: 100 times for 20 samples. Immune to the whole
    model converging, because the median falls too. Use `below` for a rail, `depth_ratio` for fading over
    depth.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ClassVar[str] = "drop"
    takes_logs: ClassVar[bool] = True
    default_for: ClassVar[int] = 20
    has_baseline: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("param", "group")

    of: Literal["norm", "rms", "norm_local"] = "norm"
    above: Positive = 100.0
    clear_below: Positive | None = None
    min_ndim: Dimensions = 2
    half_life: HalfLife = field(default=100, metadata={"rule_key": True})
    warmup: Warmup = field(default=40, metadata={"rule_key": True})

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline, which does not depend on the threshold."""
        return (self.kind, self.min_ndim, self.half_life, self.warmup)

    def init(self, size: int) -> ShareState:
        """No sample seen."""
        return ShareState(np.zeros(size, np.int32), np.zeros(size, np.float32))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """exp(b - y); NaN while warming up, and for a missing or non-finite sample."""
        return self._factor(cast(ShareState, state), share_of(sample))

    def learn(self, state: State, sample: Sample) -> ShareState:
        """Move the usual share toward the present one, by at most 0.5 nats' worth after the warm-up."""
        before = cast(ShareState, state)
        return self._absorb(before, share_of(sample) - before.b)

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; no exponentials while nothing is near the threshold."""
        before, y = cast(ShareState, state), share_of(sample)
        d = y - before.b
        after = self._absorb(before, d)
        # fmin: a sample that is missing does not fall.
        if not -float(np.fmin.reduce(d)) >= self.log_surely_below:
            return None, after
        return self._factor(before, y), after

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance`, with neither masks nor exponentials while nothing is near the threshold."""
        before, y = cast(ShareState, state), x - _median(x)
        enough = mature(self.half_life, self.warmup)
        pace = common_pace(before.n, self.warmup, self.half_life, enough)
        d = y - before.b
        if pace is None:
            return self._factor(before, y), self._absorb(before, d)
        low, high = float(np.minimum.reduce(d)), float(np.maximum.reduce(d))
        score = None if -low < self.log_surely_below else self._factor(before, y)
        if low < -STEP or high > STEP:
            np.clip(d, _FALL, _RISE, out=d)
        d *= pace[0]
        d += before.b
        return score, ShareState(pace[1], d)

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn; only what depends on the sample before is done for one at a time."""
        before = cast(ShareState, state)
        enough = mature(self.half_life, self.warmup)
        paces = common_paces(before.n, self.warmup, self.half_life, enough, len(x))
        if paces is None:
            return Exceeding.advance_many_logs(self, state, x)
        shares, found, b = x - _medians(x)[:, None], np.empty_like(x), before.b
        low = np.empty(len(x), np.float32)
        for t, (new, weight, usual) in enumerate(zip(shares, paces[0], found, strict=True)):
            d = new - b
            low[t] = np.minimum.reduce(d)
            np.maximum(d, _FALL, out=d)
            np.minimum(d, _RISE, out=d)
            d *= weight
            np.add(d, b, out=usual)
            b = usual
        # What comes closer is judged by itself.
        below = leading(-low.astype(np.float64) < self.log_surely_below)
        return below, ShareState(paces[1][below - 1], found[below - 1].copy()) if below else state

    def _factor(self, state: ShareState, y: Array32) -> NDArray[np.float64]:
        fall = np.minimum(state.b.astype(np.float64) - y, LARGEST_EXPONENT)
        return np.where(state.n >= self.warmup, np.exp(fall), np.nan)

    def _absorb(self, before: ShareState, d: Array32) -> ShareState:
        """Learn deviations d[K] from the usual share; NaN = nothing."""
        n, b = before
        enough = mature(self.half_life, self.warmup)
        known = ~np.isnan(d)
        d = np.where(n >= self.warmup, np.clip(d, np.float32(-STEP), np.float32(STEP)), d)
        a = np.maximum(gain(self.half_life), 1.0 / (n + 1.0)).astype(np.float32)
        return ShareState(np.minimum(n + known, enough).astype(np.int32), np.where(known, b + a * d, b))

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> ShareState:
        """Start over, unless it is to keep judging: a share hardly depends on changes of the whole."""
        n, b = cast(ShareState, state)
        if keep_judging:
            return ShareState(n, b)
        return ShareState(np.where(mask, 0, n).astype(np.int32), np.where(mask, np.float32(0), b))


def share_of(sample: Sample) -> Array32:
    """y[K] = ln norm_i - median_j ln norm_j in nats, float32; NaN where missing or not finite."""
    values = sample.values
    if float(values.min()) > 0 and float(values.max()) < math.inf and bool(sample.present.all()):
        x = np.log(values).astype(np.float32, copy=False)
        return x - _median(x)
    usable = sample.present & (values >= 0) & (values < math.inf)
    x = np.log(np.maximum(values, ZERO_NORM)).astype(np.float32, copy=False)
    middle = _median(x[usable]) if usable.any() else np.float32(np.nan)
    return np.where(usable, x - middle, np.float32(np.nan))


def _median(x: Array32) -> np.float32:
    """As np.median of finite values, without its checks, which cost more than the median at this size."""
    half, x = len(x) // 2, x.copy()
    x.partition(half)
    high = float(x[half])
    # The mean of two float32 is exact as a float, but for one rounding.
    return np.float32(high if len(x) % 2 else (float(np.maximum.reduce(x[:half])) + high) / 2)


def _medians(x: Array32) -> Array32:
    """float32[T]: of each of x[T, K] what `_median` says."""
    half, size = x.shape[1] // 2, x.shape[1]
    x = x.copy()
    x.partition(half, axis=1)
    high = x[:, half].astype(np.float64)
    if size % 2:
        return high.astype(np.float32)
    low: NDArray[np.float64] = np.maximum.reduce(x[:, :half], axis=1).astype(np.float64)
    return ((low + high) / 2).astype(np.float32)


@register_detector
@dataclass(frozen=True, slots=True)
class DepthRatio(Detector):
    """Norm of the first weight matrices over that of the last: gradients that fade (or explode) on the way
    back.

    The score is the ratio of the root-mean-square norms of the first and the last `ends` sites in order of
    depth (default 1). Give `below` (vanishing; 1e-3 when neither is given) or `above` (exploding; 1e3 is
    usual), in a rule each. `layers` keeps only the sites whose name matches the glob; `depths` names two
    depths instead.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ClassVar[str] = "depth_ratio"
    default_for: ClassVar[int] = 20
    elementwise: ClassVar[bool] = False
    in_depth_order: ClassVar[bool] = True
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["norm", "rms", "norm_local"] = "norm"
    below: Positive | None = None
    above: Positive | None = None
    ends: Annotated[int, Limits(ge=1)] = 1
    layers: str | None = None
    depths: tuple[int, int] | None = None
    min_ndim: Dimensions = 2

    def __post_init__(self) -> None:
        if self.below is not None and self.above is not None:
            raise ValueError("give below or above, and the other in a rule of its own")

    @property
    def comparison(self) -> Comparison:
        """By which bound was given."""
        return "below" if self.above is None else "above"

    @property
    def fires_at(self) -> float:
        """The bound given, else 1e-3."""
        return self.above if self.above is not None else (1e-3 if self.below is None else self.below)

    def cannot_breach(self, low: float, high: float) -> bool:
        """True if no ratio of two values in [low, high] is beyond the bound (with a margin for rounding)."""
        if not (low > 0 and high < math.inf):
            return False
        if self.above is not None:
            return high / low < self.above * (1 - 1e-6)
        return low / high > self.fires_at * (1 + 1e-6)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """float64[1] from K sites in order of depth; NaN unless both ends are present and finite.

        The last end must not be zero; with fewer than two ends' worth of sites there is no judgement.
        """
        k = self.ends
        if len(sample.values) < 2 * k or not (sample.present[:k].all() and sample.present[-k:].all()):
            return np.array([np.nan])
        first = math.fsum(value * value for value in sample.values[:k].tolist())
        last = math.fsum(value * value for value in sample.values[-k:].tolist())
        usable = math.isfinite(first) and 0 < last < math.inf
        return np.array([math.sqrt(first / last) if usable else np.nan])
