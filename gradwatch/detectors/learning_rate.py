"""A learning rate that leaves its schedule: it multiplies in one step, beyond anything it was before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradwatch.detectors.detector import STRICT, Detector, Sample, Scope, State, register_detector
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.snapshot import BoolArray, FloatArray

Array32 = NDArray[np.float32]


LARGEST = float(np.finfo(np.float32).max)
LEAST = 10
"""Values that must be known before one is judged: a warm-up may begin at a thousandth, and rise by much at once."""


class RateState(NamedTuple):
    """Of K series: `n` positive values (int32, counted up to 10), the `last` and the `largest` of them (0 = none)."""

    n: NDArray[np.int32]
    last: Array32
    largest: Array32


@register_detector
@dataclass(frozen=True, slots=True)
class LrJump(Detector):
    """lr > above x that of the step before, and above the largest so far.

    The score is that factor; 0 where the value is not the largest yet. So schedules that move at each step do not
    breach: warm-ups climb by less (`ConstantLR` by 3 by default), restarts go back to what was there before. A warm-up
    by epochs from less than 1 / above does, after its first epoch, and so does an optimizer or an averaging of weights
    that goes on with a larger rate. The eleventh rate is the first to be judged; 0 is neither judged nor learned
    (`below` is for one that stays 0). One that is not finite ruins every weight: the score is infinite, from the first
    rate on. Of several parameter groups it is the largest rate of those that are trained.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "lr_jump"
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["lr"] = "lr"
    above: Positive = 3.5

    def __post_init__(self) -> None:
        if not self.above > 1:
            raise ValueError("above is the factor of a jump: it must be greater than 1")

    @property
    def fires_at(self) -> float:
        """`above`."""
        return self.above

    def in_words(self, score: float) -> str:
        """The factor over the largest rate so far; infinity is of a rate that is not finite."""
        return f"{score:.4g} times the largest before" if score < math.inf else "not a finite number"

    def init(self, size: int) -> RateState:
        """No value seen."""
        return RateState(np.zeros(size, np.int32), np.zeros(size, np.float32), np.zeros(size, np.float32))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """As above; NaN for the first ten, and one that is missing or not positive."""
        rate, value = cast(RateState, state), _single(sample.values)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factor = np.where(value > rate.largest, value.astype(np.float64) / rate.last, 0.0)
        ruinous = sample.present & ~np.isfinite(sample.values)
        return np.where(ruinous, np.inf, np.where(_known(sample) & (rate.n >= LEAST), factor, np.nan))

    def learn(self, state: State, sample: Sample) -> RateState:
        """The last value and the largest, with this one."""
        rate, value, known = cast(RateState, state), _single(sample.values), _known(sample)
        largest = np.where(known, np.maximum(rate.largest, value), rate.largest)
        n = np.minimum(rate.n + known, LEAST).astype(np.int32)
        return RateState(n, np.where(known, value, rate.last), largest)

    def indifferent(self, state: State, scalar: Callable[[str], float | None]) -> bool:
        """True of the same value as before, or none."""
        value, rate = scalar(self.of), cast(RateState, state)
        return value is None or bool(rate.n[0] >= LEAST and _single(value) == rate.last[0])

    def logs_of(self, values: Sequence[float]) -> Array32:
        """The values themselves: what `advance_many_logs` takes of this kind."""
        return _single(values)

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance` of these values, all present."""
        after = _without_rise(cast(RateState, state), x[None])
        return self.advance(state, Sample(x, np.ones(len(x), np.bool_))) if after is None else (None, after)

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn; at once where no rate that is judged exceeds those before it."""
        after = _without_rise(cast(RateState, state), x)
        return Detector.advance_many_logs(self, state, x) if after is None else (len(x), after)

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> RateState:
        """Start over; what was the largest stays so across a change that keeps judging."""
        rate = cast(RateState, state)
        zeroed = (np.where(mask, np.zeros(1, one.dtype), one) for one in rate)
        return rate if keep_judging else RateState(*zeroed)


def _without_rise(state: RateState, x: Array32) -> RateState | None:
    """The state after these x[T, K]; None where one that is judged is the largest yet, or not all are known."""
    n, _, largest = state
    if not (x > 0).all() or not (x < math.inf).all():
        return None
    before = np.maximum.accumulate(np.concatenate((largest[None], x)))
    judged = np.arange(len(x))[:, None] >= LEAST - n
    if (judged & (x > before[:-1])).any():
        return None
    return RateState(np.minimum(n + len(x), LEAST).astype(np.int32), x[-1].copy(), before[-1].copy())


def _single(values: ArrayLike) -> Array32:
    """In single precision, a rate beyond it (one that is no infinity) as its largest number."""
    given = np.asarray(values, np.float64)
    capped: Array32 = np.where(np.isinf(given), given, np.clip(given, -LARGEST, LARGEST)).astype(np.float32)
    return capped


def _known(sample: Sample) -> BoolArray:
    known: BoolArray = sample.present & (sample.values > 0) & (sample.values < math.inf)
    return known
