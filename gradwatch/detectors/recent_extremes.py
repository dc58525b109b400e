"""A sample against the largest or smallest of its recent past: a factor that needs no spread to be known.

A robust z is blind where a converged series scatters over orders of magnitude: its σ̂ is large. The extremes of the last
samples already hold that scatter, and nothing healthy exceeds them by much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import (
    LARGEST_EXPONENT,
    LOG_OF_ZERO,
    Array32,
    ByFactor,
    Warmup,
    log_of,
    log_with_zeros,
)
from gradwatch.detectors.detector import (
    MARGIN,
    STRICT,
    NormColumn,
    ObservedColumn,
    Sample,
    State,
    register_detector,
)
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.columns import scalar_name
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray, FloatArray

PARTS = 10
"""Parts of a window, each kept as its extreme: a window forgets a tenth of its samples at a time."""
NONE = np.float32(-1e4)
"""Stands for no sample: the logarithm of no float is as small."""

Window = Annotated[int, Limits(ge=1, le=1_000_000)]
Factor = Annotated[float, Limits(gt=1, allow_inf_nan=False)]
Lag = Annotated[int, Limits(ge=0, le=1_000_000)]


class RecentState(NamedTuple):
    """Of K series: `n` samples learned (int32), the extreme of the part under way, and of the `parts[B, K]`.

    The newest part comes first; `compared` is the extreme of those that are old enough. Extremes are the largest of
    ±ln value; `NONE` where there is none.
    """

    n: NDArray[np.int32]
    under_way: Array32
    parts: Array32
    compared: Array32


class Sizes(NamedTuple):
    """Samples of a `part`, the number of `parts` kept, how many of these are too new (`late`) to be compared with.

    Samples are counted up to `most`: beyond the warm-up only the place in a part matters. A logarithm that is
    `surely_below` the threshold does not breach.
    """

    part: int
    parts: int
    late: int
    most: int
    surely_below: float


@cache
def _sizes(window: int, lag: int, warmup: int, above: float) -> Sizes:
    part = -(-window // PARTS)
    late = -(-lag // part)
    enough = -(-max(warmup, (late + 1) * part if lag else 0) // part)
    return Sizes(part, late + -(-window // part), late, (enough + 1) * part, math.log(above) - MARGIN)


@dataclass(frozen=True, slots=True)
class _RecentExtreme(ByFactor):
    """Factor by which a sample is beyond the extreme of those before it; `SIGN` +1: the largest, -1: the smallest.

    x = ±ln value; the reference is the largest x of the last `window` samples and of up to a tenth more, since it is
    kept in ten parts. A sample beyond `above` is learned as if it were `above` times the reference, so that a broken
    step does not blind the rest of the window and a new level is known soon.
    """

    has_baseline: ClassVar[bool] = True
    takes_logs: ClassVar[bool] = True
    SIGN: ClassVar[int] = 1

    of: NormColumn | ObservedColumn | Literal["loss", "lr"] = "norm"
    above: Positive = 5.0
    clear_below: Positive | None = None
    window: Window = 100
    lag: Lag = 0
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline; what is learned depends on the threshold, too."""
        return (self.kind, self.above, self.window, self.lag, self.warmup)

    @property
    def samples_needed(self) -> int:
        """The warm-up, or what it takes until a part of the window is `lag` samples old."""
        sizes = _sizes(self.window, self.lag, self.warmup, self.above)
        return max(self.warmup, (sizes.late + 1) * sizes.part if self.lag else 0)

    def init(self, size: int) -> RecentState:
        """No sample seen."""
        parts = np.full((_sizes(self.window, self.lag, self.warmup, self.above).parts, size), NONE)
        return RecentState(np.zeros(size, np.int32), np.full(size, NONE), parts, np.full(size, NONE))

    def scale(self, sample: Sample) -> Array32:
        """±ln value; not finite where missing, not finite or not positive."""
        return self.SIGN * log_of(sample)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor; NaN while warming up, and for a sample that is missing or not finite."""
        return self._scored(cast(RecentState, state), self.scale(sample))

    def score_logs(self, state: State, x: Array32) -> NDArray[np.float64]:
        """As `score`, of ln value; NaN = no sample."""
        return self._scored(cast(RecentState, state), x if self.SIGN > 0 else -x)

    def learn(self, state: State, sample: Sample) -> RecentState:
        """Keep the sample, up to the bound."""
        recent = cast(RecentState, state)
        return self._absorb(recent, self.scale(sample), self._reference(recent))

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; no exponentials while nothing is near the threshold."""
        return self._advanced(cast(RecentState, state), self.scale(sample))

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance`, of ln value."""
        return self._advanced(cast(RecentState, state), x if self.SIGN > 0 else -x)

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn; at once where none of them comes near what it is compared with."""
        recent = cast(RecentState, state)
        after = self._after_all(recent, x) if (recent.n == recent.n[0]).all() else None
        return ByFactor.advance_many_logs(self, state, x) if after is None else (len(x), after)

    def _after_all(self, recent: RecentState, x: Array32) -> RecentState | None:
        """The state after all of x[T, K], where none of it comes near what stays in the window meanwhile; else None.

        All series have learned equally many samples.
        """
        n, under_way, parts, compared = recent
        sizes, count = _sizes(self.window, self.lag, self.warmup, self.above), len(x)
        place = int(n[0]) % sizes.part
        closed = (place + count) // sizes.part
        kept = len(parts) - closed
        if kept <= sizes.late:
            return None
        borders = [0, *range(sizes.part - place, count, sizes.part), count]
        extreme = np.maximum.reduce if self.SIGN > 0 else np.minimum.reduce
        pieces: Array32 = np.array([extreme(x[a:b]) for a, b in pairwise(borders)])
        if self.SIGN < 0:
            np.negative(pieces, out=pieces)
        # While all that is old enough is yet to come there is nothing to compare with.
        if closed > sizes.late or not self.lag or float(parts[sizes.late - closed :].max()) > NONE:
            stays = np.maximum.reduce(parts[sizes.late : kept]) if closed else compared
            reference = stays if self.lag else np.maximum(stays, under_way)
            if not float((pieces - reference).max()) < sizes.surely_below:
                return None
        np.maximum(pieces[0], under_way, out=pieces[0])
        after = int(n[0]) + count
        if after >= sizes.most:
            after = sizes.most - sizes.part + (after - sizes.most) % sizes.part
        if closed:
            parts = np.concatenate((pieces[:closed][::-1], parts[:kept]))
            compared = np.maximum.reduce(parts[sizes.late :])
        under_way = pieces[closed].copy() if closed < len(pieces) else np.full_like(under_way, NONE)
        return RecentState(np.full_like(n, after), under_way, parts, compared)

    def indifferent(self, state: State, scalar: Callable[[str], float | None]) -> bool:
        """True of a value that has no logarithm, or of none."""
        value = scalar(scalar_name(self.of))
        return value is None or value < 0 or (value == 0 and self.SIGN > 0)

    def level(self, state: State) -> NDArray[np.float64]:
        """The largest of the window, or the smallest; 0 or inf where there is none yet."""
        with np.errstate(over="ignore"):
            return np.exp(self.SIGN * self._reference(cast(RecentState, state)).astype(np.float64))

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> RecentState:
        """Start over; across a change that keeps judging the window goes on."""
        recent = cast(RecentState, state)
        if keep_judging:
            return recent
        n, (under_way, parts, compared) = np.where(mask, 0, recent.n).astype(np.int32), recent[1:]
        return RecentState(n, *(np.where(mask, NONE, one) for one in (under_way, parts, compared)))

    def _scored(self, recent: RecentState, x: Array32) -> NDArray[np.float64]:
        return self._factor(recent, x - self._reference(recent))

    def _reference(self, recent: RecentState) -> Array32:
        return recent.compared if self.lag else np.maximum(recent.compared, recent.under_way)

    def _advanced(self, recent: RecentState, x: Array32) -> tuple[FloatArray | None, RecentState]:
        sizes = _sizes(self.window, self.lag, self.warmup, self.above)
        if len(x) == 1:  # a single series, in plain floats
            value, under_way, reach = float(x[0]), float(recent.under_way[0]), float(recent.compared[0])
            reach, n = reach if self.lag or reach > under_way else under_way, int(recent.n[0]) + 1
            if NONE < value < reach + sizes.surely_below and n % sizes.part and n < sizes.most:
                extreme = x if value > under_way else recent.under_way
                return None, RecentState(np.array([n], np.int32), extreme, recent.parts, recent.compared)
        reference = self._reference(recent)
        beyond = x - reference
        if float(np.maximum.reduce(beyond)) < sizes.surely_below:  # not so if one is NaN: all are known
            return None, self._after(recent, recent.n + np.int32(1), np.maximum(recent.under_way, x))
        after = self._absorb(recent, x, reference)
        # fmax: a sample that is missing is not beyond.
        if float(np.fmax.reduce(beyond)) < sizes.surely_below:
            return None, after
        return self._factor(recent, beyond), after

    def _factor(self, recent: RecentState, beyond: Array32) -> NDArray[np.float64]:
        known = (recent.n >= self.warmup) & (self._reference(recent) > NONE) & np.isfinite(beyond)
        factor = np.exp(np.minimum(beyond.astype(np.float64), LARGEST_EXPONENT))
        return np.where(known, factor, np.nan)

    def _absorb(self, recent: RecentState, x: Array32, reference: Array32) -> RecentState:
        known = self._learned(x)
        bound = np.where(reference > NONE, reference + np.float32(math.log(self.above)), -NONE)
        under_way = np.where(known, np.maximum(recent.under_way, np.minimum(x, bound)), recent.under_way)
        return self._after(recent, recent.n + known, under_way)

    def _learned(self, x: Array32) -> BoolArray:
        """bool[K]: the samples that become part of the window."""
        finite: BoolArray = np.isfinite(x)
        return finite

    def _after(self, recent: RecentState, n: NDArray[np.int32], under_way: Array32) -> RecentState:
        """The state with these counts and extremes, where parts that have just become full are closed."""
        sizes = _sizes(self.window, self.lag, self.warmup, self.above)
        low, high = int(np.minimum.reduce(n)), int(np.maximum.reduce(n))
        if low == high and low % sizes.part and low < sizes.most:  # almost every step: no part is closed
            return RecentState(n, under_way, recent.parts, recent.compared)
        full = (n % sizes.part == 0) & (n != recent.n)
        parts = np.where(full, np.concatenate((under_way[None], recent.parts[:-1])), recent.parts)
        counted = np.where(n >= sizes.most, n - sizes.part, n).astype(np.int32)
        compared = np.maximum.reduce(parts[sizes.late :])
        return RecentState(counted, np.where(full, NONE, under_way), parts, compared)


@register_detector
@dataclass(frozen=True, slots=True)
class AboveRecentMax(_RecentExtreme):
    """value > above x the largest of the last `window` samples: a jump that needs no spread to be seen.

    The second yardstick beside `spike`, whose z is blind where a series scatters widely. The window ends `lag` samples
    before this one (0: at the one before); it is kept in tenths, and holds up to a tenth more. A sample of exactly 0 is
    neither judged nor learned; one beyond `above` is learned as `above` times the largest. Default: five times the
    largest of 100, judged from the 20th sample on.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "above_recent_max"

    def in_words(self, score: float) -> str:
        """The factor over the largest."""
        return f"{score:.4g} times the largest of the last {self.window}"


@register_detector
@dataclass(frozen=True, slots=True)
class BelowRecentMin(_RecentExtreme):
    """value < the smallest of the samples before it / above: a fall, of a single series or of the whole model.

    As `above_recent_max`, downward. The window ends `lag` samples before this one, so that all samples of a fall are
    compared with those before it, where `for:` is at most `lag`. A value of exactly 0 is judged as 1e-30 and is not
    learned. Default: a tenth of the smallest of 200, for 20 samples.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "below_recent_min"
    default_for: ClassVar[int] = 20
    SIGN: ClassVar[int] = -1

    above: Positive = 10.0
    window: Window = 200
    lag: Lag = 20

    def in_words(self, score: float) -> str:
        """The factor below the smallest."""
        return f"{score:.4g} times below the smallest of {self.window} before"

    def scale(self, sample: Sample) -> Array32:
        """-ln value, of 0 that of 1e-30; not finite where missing, not finite or negative."""
        return log_with_zeros(sample) * np.float32(self.SIGN)

    def _learned(self, x: Array32) -> BoolArray:
        return np.isfinite(x) & (x < -LOG_OF_ZERO)
