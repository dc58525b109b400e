"""Baselines: level and spread of a series over its past, into which no NaN enters, and outliers only up to a bound.

All are of x = ln value (of a loss, which may be negative: asinh), so "ten times the usual" means the same at
any scale. The state is float32: x is known to no more, and half the bytes are half the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import Exceeding, Sample
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray, FloatArray

RING = 20
"""Samples after which m and s restart from median and MAD, and from which on outliers are winsorised."""
FLOOR = 0.10
"""Smallest σ̂ in nats: a series that hardly moves would otherwise alarm at a change of a per cent."""
CLEAR = 3.0
"""z below which a spike is over, unless the rule says otherwise."""
WINSOR = 3.0
"""An outlier is learned as if it were this many σ̂ away, so the baseline can climb but not jump."""
SIGMA_PER_MEAN_DEVIATION = 1.2533
"""σ of a normal distribution over its mean absolute deviation, sqrt(π/2)."""
MEAN_PER_MEDIAN_DEVIATION = 1.4826 / SIGMA_PER_MEAN_DEVIATION
"""Mean over median absolute deviation of a normal distribution."""

ZERO_NORM = 1e-30
"""A norm of exactly zero counts as this, so that a gradient that vanishes completely is a fall too."""
LOG_OF_ZERO = np.float32(math.log(ZERO_NORM))

LARGEST_EXPONENT = 700.0
"""e^700 is still a float64."""

Array32 = NDArray[np.float32]
HalfLife = Annotated[int, Limits(ge=1)]
Warmup = Annotated[int, Limits(ge=1)]


class LevelState(NamedTuple):
    """Level and spread of K series: `n` samples learned (int32, counted only as far as it matters), `m` and
    `s`.

    `held[K]`: m and s were kept over a re-baseline; they judge until new samples replace them.
    `ring[RING, K]`: the warm-up samples; `[0, K]` once every series is past them.
    """

    n: NDArray[np.int32]
    m: Array32
    s: Array32
    held: BoolArray
    ring: Array32


@cache
def gain(half_life: float) -> float:
    """1 - 2^(-1/h): the weight of a new sample in an exponentially weighted mean of half-life h samples."""
    return float(-math.expm1(-math.log(2.0) / half_life))


def empty_level(size: int) -> LevelState:
    """`size` series that have seen nothing."""
    return LevelState(
        np.zeros(size, np.int32),
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.zeros(size, np.bool_),
        np.zeros((RING, size), np.float32),
    )


def deviation(state: LevelState) -> Array32:
    """σ̂ = max(1.2533·s, 0.10), in nats."""
    sigma: Array32 = np.maximum(state.s * np.float32(SIGMA_PER_MEAN_DEVIATION), np.float32(FLOOR))
    return sigma


def judged(state: LevelState, warmup: int) -> BoolArray:
    """bool[K]: the series that have a baseline to be judged by."""
    ready: BoolArray = (state.n >= warmup) | state.held
    return ready


def log_of(sample: Sample) -> Array32:
    """ln value as float32[K]; not finite where missing, not finite, or not positive."""
    values = sample.values
    if float(values.min()) > 0 and bool(sample.present.all()):
        if len(values) == 1 and values.dtype == np.float64:
            return log_of_scalar(float(values[0]))
        return np.log(values).astype(np.float32, copy=False)
    usable = sample.present & (values > 0) & (values < math.inf)
    return np.log(np.where(usable, values, np.nan)).astype(np.float32, copy=False)


def log_with_zeros(sample: Sample) -> Array32:
    """ln value as float32[K], of 0 that of 1e-30; NaN where missing, not finite or negative."""
    zero, log = sample.present & (sample.values == 0), log_of(sample)
    return np.where(zero, LOG_OF_ZERO, np.where(np.isfinite(log), log, np.float32(np.nan)))


def log_of_scalar(value: float) -> Array32:
    """ln of a positive number as float32[1]; NaN of a NaN."""
    return logs_of_scalars((value,))


def logs_of_scalars(values: Sequence[float]) -> Array32:
    """ln of T positive numbers as float32[T]; by the math library, whose last bit numpy's need not have."""
    return np.array([*map(math.log, values)], np.float32)


def winsorise(d: Array32, bound: Array32) -> None:
    """Bring d[K] to within ±bound[K], in place; `bound` is overwritten too."""
    np.minimum(d, bound, out=d)
    np.negative(bound, out=bound)
    np.maximum(d, bound, out=d)


def absorb(state: LevelState, x: Array32, sigma: Array32, half_life: float, enough: int) -> LevelState:
    """Learn x[K] (nats; not finite = nothing): m moves by a part of x - m within ±3σ̂, s towards its size (`Spike`).

    Samples are counted up to `enough`.
    """
    known = np.isfinite(x)
    filled = state.n >= RING
    d = np.where(known, x, state.m) - state.m
    d = np.where(filled, np.clip(d, -WINSOR * sigma, WINSOR * sigma), d)
    moving = known & (filled | ~state.held)
    a: Array32 = np.maximum(gain(half_life), 1.0 / (state.n + 1.0)).astype(np.float32)
    m = np.where(moving, state.m + a * d, state.m)
    # The first sample says nothing about spread: s starts with the second.
    s = np.where(moving & (state.n > 0), state.s + a * (np.abs(d) - state.s), state.s)
    n = np.minimum(state.n + known, enough).astype(np.int32)
    return _fill(LevelState(n, m, s, state.held, state.ring), state.n, x, known & ~filled)


@cache
def mature(half_life: float, warmup: int) -> int:
    """From this many samples on, 1/(n + 1) is below the gain and n need not be counted."""
    return max(RING, warmup, math.ceil(1.0 / gain(half_life)))


def common_pace(
    n: NDArray[np.int32], least: int, half_life: float, enough: int
) -> tuple[np.float32, NDArray[np.int32]] | None:
    """The weight of the next sample, and the counts after it; None unless all series have learned alike.

    That is: at least `least` samples each, and either equally many or all of them mature.
    """
    low = int(np.minimum.reduce(n))
    if low >= enough:
        return _steady_weight(half_life), n
    if low < least or low != int(np.maximum.reduce(n)):
        return None
    return np.float32(max(gain(half_life), 1.0 / (low + 1.0))), n + np.int32(1)


def common_paces(
    n: NDArray[np.int32], least: int, half_life: float, enough: int, count: int
) -> tuple[list[np.float32], list[NDArray[np.int32]]] | None:
    """The weights of the next `count` samples, and the counts after each, as `common_pace` gives them in turn."""
    low = int(np.minimum.reduce(n))
    if low < enough and (low < least or low != int(np.maximum.reduce(n))):
        return None
    steady, young = gain(half_life), max(0, min(count, enough - low))
    weights = [np.float32(max(steady, 1.0 / (low + k + 1.0))) for k in range(young)]
    counts = [n + np.int32(k + 1) for k in range(young)]
    after = counts[-1] if young else n
    return weights + [_steady_weight(half_life)] * (count - young), counts + [after] * (count - young)


@cache
def _steady_weight(half_life: float) -> np.float32:
    return np.float32(gain(half_life))


def leading(holds: BoolArray) -> int:
    """Count the first of [T] that hold."""
    return len(holds) if holds.all() else int(holds.argmin())


def _fill(state: LevelState, before: NDArray[np.int32], x: Array32, filling: BoolArray) -> LevelState:
    """Keep the warm-up samples of the series still `filling`; restart those that just completed theirs."""
    if not filling.any():
        return state
    ring, m, s = state.ring.copy(), state.m, state.s
    columns = np.flatnonzero(filling)
    ring[before[columns], columns] = x[columns]
    done = columns[before[columns] == RING - 1]
    if len(done):
        m, s = m.copy(), s.copy()
        m[done] = np.median(ring[:, done], axis=0)
        s[done] = np.median(np.abs(ring[:, done] - m[done]), axis=0) * np.float32(MEAN_PER_MEDIAN_DEVIATION)
    finished = bool((state.n >= RING).all())
    return LevelState(state.n, m, s, state.held, ring[:0] if finished else ring)


def restart_level(state: LevelState, mask: BoolArray, warmup: int, keep_judging: bool) -> LevelState:
    """The series in `mask[K]` warm up again; with `keep_judging` the old level judges until they have."""
    zero = np.float32(0)
    held = np.where(mask, judged(state, warmup) if keep_judging else False, state.held)
    keep = ~mask | held
    ring = state.ring if len(state.ring) else np.zeros((RING, len(mask)), np.float32)
    n = np.where(mask, 0, state.n).astype(np.int32)
    m, s = np.where(keep, state.m, zero), np.where(keep, state.s, zero)
    return LevelState(n, m, s, held, ring)


class ByFactor(Exceeding):
    """Base of the kinds whose score is a factor over, or under, a value of before."""

    __slots__ = ()

    def __post_init__(self) -> None:
        Exceeding.__post_init__(self)
        if not self.above > 1:
            raise ValueError("above is a factor: it must be greater than 1")

    def exceeded(self, score: FloatArray) -> FloatArray:
        """As logarithms: 1 at `above`."""
        with np.errstate(divide="ignore"):
            return np.log(score) / math.log(self.above)

    def logs_of(self, values: Sequence[float]) -> Array32 | None:
        """ln of each; None where one is not positive."""
        return logs_of_scalars(values) if min(values) > 0 else None


class Robust(Exceeding):
    """Base of all kinds with a robust z: when they fire and clear, and whose baseline they share."""

    __slots__ = ()
    has_baseline: ClassVar[bool] = True

    half_life: int
    warmup: int

    @property
    def clears_at(self) -> float:
        """`clear_below`, or 3 (`above`, if that is less)."""
        return min(CLEAR, self.above) if self.clear_below is None else self.clear_below

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline; it depends on neither the column's name nor the threshold."""
        return (self.kind, self.half_life, self.warmup)

    def init(self, size: int) -> LevelState:
        """No sample seen."""
        return empty_level(size)
