"""The total norm that fades while the loss does not: what a fit that gets better explains, and what it does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import LARGEST_EXPONENT, HalfLife, Warmup, gain, mature
from gradwatch.detectors.detector import (
    STRICT,
    Exceeding,
    Sample,
    Scope,
    State,
    advance_one,
    register_detector,
)
from gradwatch.detectors.recent_extremes import Factor
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.snapshot import BoolArray, FloatArray

LOSS = "loss"


class FadeState(NamedTuple):
    """Of K series: `n` norms learned and `losses` beside them (int32, counted as far as it matters), and the means.

    Means of ln value, over a short time and a long one: of the norms and of the losses.
    """

    n: NDArray[np.int32]
    fast: NDArray[np.float64]
    slow: NDArray[np.float64]
    losses: NDArray[np.int32]
    loss_fast: NDArray[np.float64]
    loss_slow: NDArray[np.float64]


class _Series(NamedTuple):
    """One of the series of a `FadeState`, in plain numbers."""

    n: int
    fast: float
    slow: float
    losses: int
    loss_fast: float
    loss_slow: float


class _After(NamedTuple):
    """A series after some `steps`; `fall`: nats by which the norm has fallen further than the loss at the last one."""

    steps: int
    series: _Series
    fall: float


@register_detector
@dataclass(frozen=True, slots=True)
class Fade(Exceeding):
    """The recent total norm is far below its long-term level, and the loss is not.

    x = ln norm, y = ln abs(loss); each has a mean over a short time and one over a long time, EW_fast and EW_slow. The
    score is exp((EW_slow(x) - EW_fast(x)) - max(0, EW_slow(y) - EW_fast(y))): how many times further the norm has
    fallen than the loss, this step included. A fit that gets better takes its gradients down with its loss, by no more
    than that (the root of it, for squared errors). A loss that is missing or 0 explains no fall. A norm of 0 is neither
    judged nor learned. Sees a sudden fall in a series that scatters widely, and a slow one (1 % a step); blind to a
    loss that is multiplied by the factor itself (use `below_recent_min`). Default: four times, for 20 steps.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "fade"
    default_for: ClassVar[int] = 20
    has_baseline: ClassVar[bool] = True
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["total_norm"] = "total_norm"
    above: Factor = 4.0
    clear_below: Positive | None = None
    fast: HalfLife = 10
    slow: HalfLife = 500
    warmup: Warmup = field(default=100, metadata={"rule_key": True})

    def __post_init__(self) -> None:
        Exceeding.__post_init__(self)
        if self.fast >= self.slow:
            raise ValueError("fast must be shorter than slow")

    @property
    def columns(self) -> tuple[str, ...]:
        """The total norm, and the loss where it is known."""
        return (self.of, LOSS)

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline, which does not depend on the threshold."""
        return (self.kind, self.fast, self.slow, self.warmup)

    def in_words(self, score: float) -> str:
        """The factor by which the norm has fallen further than the loss."""
        return f"{score:.4g} times further below its long-term level than the loss is below its own"

    def init(self, size: int) -> FadeState:
        """No sample seen."""
        return _together([_Series(0, 0.0, 0.0, 0, 0.0, 0.0)] * size)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor; NaN while warming up, and for a norm that is missing, not finite or not positive."""
        found = []
        for before, norm, loss in _series(cast(FadeState, state), sample):
            known = 0 < norm < math.inf and before.n >= self.warmup
            fall = self._after(before, ((norm, loss),), math.inf).fall
            found.append(math.exp(min(fall, LARGEST_EXPONENT)) if known else math.nan)
        return np.array(found)

    def learn(self, state: State, sample: Sample) -> FadeState:
        """Move the means; the first samples are averaged plainly."""
        series = _series(cast(FadeState, state), sample)
        return _together(self._after(one, ((norm, loss),), math.inf).series for one, norm, loss in series)

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; almost every step in plain floats: None = it does not breach."""
        return advance_one(self, state, sample)

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """As `advance` of each, in plain floats, up to one that may breach."""
        before = cast(FadeState, state)
        if len(before.n) != 1:
            return 0, state
        norms = [(values.get(self.of, math.nan), values.get(LOSS, math.nan)) for values in steps]
        after = self._after(_apart(before)[0], norms, self.log_surely_below)
        return after.steps, _together((after.series,)) if after.steps else state

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> FadeState:
        """Start over; a level across a change that keeps judging goes on."""
        before = cast(FadeState, state)
        if keep_judging:
            return before
        return FadeState(*(np.where(mask, np.zeros(1, one.dtype), one) for one in before))

    def _after(self, series: _Series, steps: Iterable[tuple[float, float]], lowest: float) -> _After:
        """The series after the first of these norms and losses that are judged to have fallen by less than `lowest`.

        What is not finite and positive is not learned, nor is the loss of such a norm. In one loop: it is run at every
        step.
        """
        enough, quick, steady = mature(self.slow, self.warmup), gain(self.fast), gain(self.slow)
        n, fast, slow, losses, loss_fast, loss_slow = series
        count, fall = 0, 0.0
        for norm, loss in steps:
            if 0 < norm < math.inf:
                judged, weight, x, explained = n >= self.warmup, 1.0 / (n + 1.0), math.log(norm), 0.0
                fast += max(quick, weight) * (x - fast)
                slow += max(steady, weight) * (x - slow)
                n = min(n + 1, enough)
                if 0 < abs(loss) < math.inf:
                    weight, y = 1.0 / (losses + 1.0), math.log(abs(loss))
                    loss_fast += max(quick, weight) * (y - loss_fast)
                    loss_slow += max(steady, weight) * (y - loss_slow)
                    losses = min(losses + 1, enough)
                    explained = max(0.0, loss_slow - loss_fast)
                fall = slow - fast - explained
                if judged and not fall < lowest:
                    break
                series = _Series(n, fast, slow, losses, loss_fast, loss_slow)
            count += 1
        return _After(count, series, fall)


def _series(state: FadeState, sample: Sample) -> Iterable[tuple[_Series, float, float]]:
    """Each series with its norm, NaN where there is none, and its loss."""
    norms = np.where(sample.present, sample.values.astype(np.float64), np.nan).tolist()
    yield from zip(_apart(state), norms, sample.aux[LOSS].tolist(), strict=True)


def _apart(state: FadeState) -> list[_Series]:
    """Each of the series."""
    return [_Series(*one) for one in zip(*(array.tolist() for array in state), strict=True)]


def _together(series: Iterable[_Series]) -> FadeState:
    """The state of these series."""
    arrays = zip(*series, strict=True)
    kinds = (np.int32, np.float64, np.float64) * 2
    return FadeState(*(np.array(one, kind) for one, kind in zip(arrays, kinds, strict=True)))
