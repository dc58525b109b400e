"""One site against the others: a norm that falls or rises while theirs do not, and norms that fade with depth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import (
    LARGEST_EXPONENT,
    ZERO_NORM,
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
from gradwatch.detectors.thresholds import Dimensions, Positive
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray, FloatArray

STEP = 0.5
"""Largest deviation in nats from the others that a usual norm learns from."""
OTHERS = 3.0
"""A third of a change at least is the parameter's own: the others' alone, where these are few, is none."""
_FALL, _RISE = np.float32(-STEP), np.float32(STEP)
_UNKNOWN = np.float32(np.nan)


class ShareState(NamedTuple):
    """`n` samples learned (int32, counted only as far as it matters); `b` the usual ln norm of K series."""

    n: NDArray[np.int32]
    b: Array32


@dataclass(frozen=True, slots=True)
class _Share(Exceeding):
    """The change of a parameter's norm beyond that of the others; `SIGN` +1: how far it rises, -1: how far it falls.

    d = x - b with x = ln norm; m = the median of d over the selected tensors, of two in the middle the one less in the
    way of `SIGN`; b += a·(m + clip(d - m, ±0.5)) with a = max(1 - 2^(-1/half_life), 1/(n + 1)); b += a·d while warming
    up. What counts is ±(d - m), but no more than three times ±d: a change of the others alone is none of its own.
    """

    takes_logs: ClassVar[bool] = True
    default_for: ClassVar[int] = 20
    has_baseline: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("param", "group")
    SIGN: ClassVar[int] = -1

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
        """The factor; NaN while warming up, and for a missing or non-finite sample."""
        before = cast(ShareState, state)
        d = _log_of(sample) - before.b
        return self._factor(before, d, self._middle(before, d))

    def learn(self, state: State, sample: Sample) -> ShareState:
        """Move the usual norms with that in the middle, and toward the present ones, after the warm-up by a bound."""
        before = cast(ShareState, state)
        d = _log_of(sample) - before.b
        return self._absorb(before, np.where(sample.values > 0, d, _UNKNOWN), self._middle(before, d))

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; no exponentials while nothing is near the threshold."""
        before = cast(ShareState, state)
        d = _log_of(sample) - before.b
        middle = self._middle(before, d)
        after = self._absorb(before, np.where(sample.values > 0, d, _UNKNOWN), middle)
        # fmin and fmax: a sample that is missing changes by nothing.
        furthest = np.fmax.reduce(d) if self.SIGN > 0 else np.fmin.reduce(d)
        if not self.SIGN * (float(furthest) - float(middle)) >= self.log_surely_below:
            return None, after
        return self._factor(before, d, middle), after

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance`, with neither masks nor exponentials while nothing is near the threshold."""
        before = cast(ShareState, state)
        d, enough = x - before.b, mature(self.half_life, self.warmup)
        pace = common_pace(before.n, self.warmup, self.half_life, enough)
        if pace is None:
            middle = self._middle(before, d)
            return self._factor(before, d, middle), self._absorb(before, d, middle)
        middle = self._middle_of_known(d)
        furthest = np.maximum.reduce(d) if self.SIGN > 0 else np.minimum.reduce(d)
        near = self.SIGN * (float(furthest) - float(middle)) >= self.log_surely_below
        score = self._factor(before, d, middle) if near else None
        return score, ShareState(pace[1], _moved(before.b, d, middle, pace[0], d))

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn, up to one that comes near the threshold."""
        before = cast(ShareState, state)
        enough = mature(self.half_life, self.warmup)
        paces = common_paces(before.n, self.warmup, self.half_life, enough, len(x))
        if paces is None:
            return Exceeding.advance_many_logs(self, state, x)
        found, b, place, size = np.empty_like(x), before.b, self._place(x.shape[1]), len(x)
        furthest, middles = np.empty(size, np.float32), np.empty(size, np.float32)
        extreme = np.maximum.reduce if self.SIGN > 0 else np.minimum.reduce
        for t, (new, weight, usual) in enumerate(zip(x, paces[0], found, strict=True)):
            d = new - b
            furthest[t] = extreme(d)
            middles[t] = middle = np.partition(d, place)[place]
            np.subtract(d, middle, out=usual)  # as `_moved`, without a call at every step
            np.maximum(usual, _FALL, out=usual)
            np.minimum(usual, _RISE, out=usual)
            usual += middle
            usual *= weight
            usual += b
            b = usual
        change = self.SIGN * (furthest.astype(np.float64) - middles.astype(np.float64))
        # What comes closer is judged by itself.
        below = leading(change < self.log_surely_below)
        return below, ShareState(paces[1][below - 1], found[below - 1].copy()) if below else state

    def _place(self, count: int) -> int:
        """The place of the middle among so many in order."""
        return (count - 1) // 2 if self.SIGN > 0 else count // 2

    def _middle_of_known(self, d: Array32) -> np.float32:
        place = self._place(len(d))
        return cast(np.float32, np.partition(d, place)[place])

    def _middle(self, state: ShareState, d: Array32) -> np.float32:
        """The median of d[K] as above, of those that are known and past the warm-up; NaN where none is."""
        known = d[~np.isnan(d) & (state.n >= self.warmup)]
        return self._middle_of_known(known) if len(known) else _UNKNOWN

    def _factor(self, state: ShareState, d: Array32, middle: np.float32) -> NDArray[np.float64]:
        own = d.astype(np.float64) * self.SIGN
        change = np.minimum(own - self.SIGN * float(middle), OTHERS * own)
        return np.where(state.n >= self.warmup, np.exp(np.minimum(change, LARGEST_EXPONENT)), np.nan)

    def _absorb(self, before: ShareState, d: Array32, middle: np.float32) -> ShareState:
        """Learn deviations d[K] from the usual norms; NaN = nothing."""
        n, b = before
        known = ~np.isnan(d)
        a = np.maximum(gain(self.half_life), 1.0 / (n + 1.0)).astype(np.float32)
        moved = np.where(n >= self.warmup, _moved(b, d, middle, a, np.empty_like(d)), b + a * d)
        enough = mature(self.half_life, self.warmup)
        return ShareState(np.minimum(n + known, enough).astype(np.int32), np.where(known, moved, b))

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> ShareState:
        """Start over, unless it is to keep judging: a share hardly depends on changes of the whole."""
        n, b = cast(ShareState, state)
        if keep_judging:
            return ShareState(n, b)
        return ShareState(np.where(mask, 0, n).astype(np.int32), np.where(mask, np.float32(0), b))


@register_detector
@dataclass(frozen=True, slots=True)
class Drop(_Share):
    """A parameter's norm falls, and the others' do not: vanishing that an absolute bound cannot see.

    d = ln norm - b (a norm of 0 counts as 1e-30) and m = the median of d over the selected tensors (of two in the
    middle the larger); b += a·(m + clip(d - m, ±0.5)) with a = max(1 - 2^(-1/half_life), 1/(n + 1)), b += a·d
    while warming up; a norm of 0 is not learned. The score is exp(min(m - d, -3 d)), how many times the norm has
    fallen beyond the others, to a third at least by itself; default: 100 times for 20 samples. Immune to the
    whole model converging, because the median falls too. Use `below` for a rail, `depth_ratio` for fading over
    depth, `fade` for the whole model.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "drop"


@register_detector
@dataclass(frozen=True, slots=True)
class Rise(_Share):
    """A parameter's norm rises, and the others' do not: one layer that grows slowly.

    As `drop`, upward: the score is exp(min(d - m, 3 d)), how many times the norm has risen beyond the others; of two
    deviations in the middle m is the smaller. Default: ten times for 20 samples.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "rise"
    SIGN: ClassVar[int] = 1

    above: Positive = 10.0


def _log_of(sample: Sample) -> Array32:
    """ln norm as float32[K], of 0 that of 1e-30; NaN where missing, negative or not finite."""
    values = sample.values
    if float(values.min()) > 0 and float(values.max()) < math.inf and bool(sample.present.all()):
        return np.log(values).astype(np.float32, copy=False)
    usable = sample.present & (values >= 0) & (values < math.inf)
    x = np.log(np.maximum(np.where(usable, values, ZERO_NORM), ZERO_NORM))
    return np.where(usable, x, np.nan).astype(np.float32)


def _moved(b: Array32, d: Array32, middle: np.float32, weight: np.float32 | Array32, out: Array32) -> Array32:
    """b + weight·(m + clip(d - m, ±0.5)), written to `out`; d may be it."""
    np.subtract(d, middle, out=out)
    np.maximum(out, _FALL, out=out)
    np.minimum(out, _RISE, out=out)
    out += middle
    out *= weight
    out += b
    return out


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

    __pydantic_config__: ClassVar[object] = STRICT
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
