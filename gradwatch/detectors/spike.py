"""Spikes of one series against its own past, by a robust z."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import (
    FLOOR,
    RING,
    SIGMA_PER_MEAN_DEVIATION,
    WINSOR,
    Array32,
    HalfLife,
    LevelState,
    Robust,
    Warmup,
    absorb,
    common_pace,
    common_paces,
    deviation,
    gain,
    judged,
    leading,
    log_of,
    logs_of_scalars,
    mature,
    restart_level,
    winsorise,
)
from gradwatch.detectors.detector import STRICT, NormColumn, ObservedColumn, Sample, State, register_detector
from gradwatch.detectors.recent_extremes import AboveRecentMax, Factor, Window
from gradwatch.detectors.thresholds import Finite, Positive
from gradwatch.records.snapshot import BoolArray, FloatArray

LEAST_OF_WINDOW = 50
"""Samples that a window must hold before a factor over its largest means something."""
_SIGMA, _FLOOR = np.float32(SIGMA_PER_MEAN_DEVIATION), np.float32(FLOOR)
_SIGMA_FLOAT, _FLOOR_FLOAT = float(_SIGMA), float(_FLOOR)


def _z(state: LevelState, x: Array32, sigma: Array32, warmup: int) -> Array32:
    """float32[K]: (x - m)/σ̂; NaN without a baseline or a finite x."""
    return np.where(judged(state, warmup) & np.isfinite(x), (x - state.m) / sigma, np.float32(np.nan))


class _Level(Robust):
    """The recursion shared by `spike` (x = ln value) and `loss_spike` (x = asinh value)."""

    __slots__ = ()
    invertible: ClassVar[bool] = True

    of: Any
    factor: float | None
    window: int

    @property
    def second(self) -> AboveRecentMax | None:
        """With `factor`: that many times the largest of the last `window` samples."""
        if self.factor is None:
            return None
        warmup = max(self.warmup, LEAST_OF_WINDOW)
        return AboveRecentMax(of=self.of, above=self.factor, window=self.window, warmup=warmup)

    def in_words(self, score: float) -> str:
        """The deviations above the usual level."""
        return f"{score:.4g} deviations above its usual level"

    def scale(self, sample: Sample) -> Array32:
        """x[K] in nats; not finite where there is nothing to judge or learn."""
        raise NotImplementedError

    def value(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of `scale`."""
        raise NotImplementedError

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """z = (x - m)/σ̂; NaN while warming up, and for a missing or non-finite sample."""
        level = cast(LevelState, state)
        x = self.scale(sample)
        return _z(level, x, deviation(level), self.warmup).astype(np.float64)

    def learn(self, state: State, sample: Sample) -> LevelState:
        """Absorb the sample, winsorised once 20 are known."""
        level = cast(LevelState, state)
        enough = mature(self.half_life, self.warmup)
        return absorb(level, self.scale(sample), deviation(level), self.half_life, enough)

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`, in few passes when every series is present, finite and warmed up."""
        return self.advance_logs(state, self.scale(sample))

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance`; x may hold anything that `scale` gives."""
        level, enough = cast(LevelState, state), mature(self.half_life, self.warmup)
        if len(x) == 1:
            below, after = self._of_one(level, x)
            if below:
                return None, after
        sigma = deviation(level)
        d = x - level.m
        z = d / sigma
        worst = float(np.maximum.reduce(z))  # NaN if any is, and then not steady
        pace = common_pace(level.n, max(RING, self.warmup), self.half_life, enough)
        if pace is None or not worst < math.inf:
            after = absorb(level, x, sigma, self.half_life, enough)
            return _z(level, x, sigma, self.warmup), after
        sigma *= WINSOR
        winsorise(d, sigma)
        a, n = pace
        spread = np.abs(d)
        spread -= level.s
        spread *= a
        spread += level.s
        d *= a
        d += level.m
        return (z if worst > self.above else None), LevelState(n, d, spread, level.held, level.ring[:0])

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn; only what depends on the sample before is done for one at a time."""
        level, enough = cast(LevelState, state), mature(self.half_life, self.warmup)
        if x.shape[1] == 1:
            return self._of_one(level, x[:, 0])
        paces = common_paces(level.n, max(RING, self.warmup), self.half_life, enough, len(x))
        if paces is None:
            return Robust.advance_many_logs(self, state, x)
        m, s = level.m, level.s
        z, means, spreads = np.empty_like(x), np.empty_like(x), np.empty_like(x)
        for new, weight, score, mean, spread in zip(x, paces[0], z, means, spreads, strict=True):
            sigma = np.maximum(s * _SIGMA, _FLOOR)
            d = new - m
            np.divide(d, sigma, out=score)
            sigma *= WINSOR
            winsorise(d, sigma)
            np.abs(d, out=spread)
            spread -= s
            spread *= weight
            spread += s
            d *= weight
            np.add(d, m, out=mean)
            m, s = mean, spread
        below = leading(np.maximum.reduce(z, axis=1).astype(np.float64) <= self.above)
        if not below:
            return 0, state
        last = below - 1
        ring = level.ring[:0]
        return below, LevelState(paces[1][last], means[last].copy(), spreads[last].copy(), level.held, ring)

    def _of_one(self, level: LevelState, x: Array32) -> tuple[int, LevelState]:
        """As `advance_many_logs` of x[T] of a single series, in plain floats: each result rounded to float32.

        Rounded twice it is the float32 that one operation of float32 gives. Ends at what is not finite, too.
        """
        enough, n = mature(self.half_life, self.warmup), int(level.n[0])
        below, m, s, steady = 0, float(level.m[0]), float(level.s[0]), gain(self.half_life)
        if n < max(RING, self.warmup):
            return 0, level
        cell = array("f", (0.0,))  # what is put into it is rounded to float32
        for value in x.tolist():
            cell[0] = s * _SIGMA_FLOAT
            sigma = max(cell[0], _FLOOR_FLOAT)
            cell[0] = value - m
            d = cell[0]
            cell[0] = d / sigma
            if not -math.inf < cell[0] <= self.above:
                break
            cell[0] = sigma * WINSOR
            d = max(min(d, cell[0]), -cell[0])
            cell[0] = steady if n >= enough else max(steady, 1.0 / (n + 1.0))
            a = cell[0]
            cell[0] = abs(d) - s
            cell[0] = cell[0] * a
            cell[0] = cell[0] + s
            s = cell[0]
            cell[0] = d * a
            cell[0] = cell[0] + m
            m = cell[0]
            n, below = min(n + 1, max(n, enough)), below + 1
        if not below:
            return 0, level
        counts = level.n if n == level.n[0] else np.array([n], np.int32)
        means, spreads = np.array([m], np.float32), np.array([s], np.float32)
        return below, LevelState(counts, means, spreads, level.held, level.ring[:0])

    def limit(self, state: State) -> NDArray[np.float64]:
        """The value at which z is the threshold: the inverse of m + above·σ̂; inf while warming up."""
        return self.usual(state, self.above)

    def usual(self, state: State, sigmas: float) -> NDArray[np.float64]:
        """The inverse of m + sigmas·σ̂; inf while warming up."""
        level = cast(LevelState, state)
        x = level.m.astype(np.float64) + sigmas * deviation(level).astype(np.float64)
        with np.errstate(over="ignore"):
            return np.where(judged(level, self.warmup), self.value(x), np.inf)

    def level(self, state: State) -> NDArray[np.float64]:
        """The inverse of m, from the 20th sample on, before any is judged; inf until then."""
        level = cast(LevelState, state)
        with np.errstate(over="ignore"):
            return np.where(
                judged(level, min(RING, self.warmup)), self.value(level.m.astype(np.float64)), np.inf
            )

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> LevelState:
        """Warm up again."""
        return restart_level(cast(LevelState, state), mask, self.warmup, keep_judging)


@register_detector
@dataclass(frozen=True, slots=True)
class Spike(_Level):
    """Robust z of the logarithm: a value far above its own recent past.

    x = ln value; σ̂ = max(1.2533·s, 0.10); z = (x - m)/σ̂; then m += a·clip(x - m, ±3σ̂) and s += a·(|clip|
    - s) with a = max(1 - 2^(-1/half_life), 1/(n + 1)); winsorised once n >= 20; at n = 20 m and s restart
    from the median and the MAD of those samples. Blind to growth below about 5 % a step (use `drift`), to
    falls (use `drop`), and to NaN (use `nonfinite`). Default: per parameter z > 10, clears at z < 3. Of an observed
    value only positive ones are judged (else `loss_spike`).

    A z is blind where a series scatters widely. With `factor` a value breaches as well that is more than so many times
    the largest of the last `window` samples (as `above_recent_max` says, judged from the 50th on); an Event says by
    which of the two.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "spike"
    takes_logs: ClassVar[bool] = True

    of: NormColumn | ObservedColumn = "norm"
    above: Positive = 10.0
    clear_below: Finite | None = None
    half_life: HalfLife = field(default=100, metadata={"rule_key": True})
    factor: Factor | None = None
    window: Window = 100
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    def scale(self, sample: Sample) -> Array32:
        """ln value."""
        return log_of(sample)

    def logs_of(self, values: Sequence[float]) -> Array32 | None:
        """ln of each; None where one is not positive."""
        return logs_of_scalars(values) if min(values) > 0 else None

    def value(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """e^x."""
        return np.exp(x)


@register_detector
@dataclass(frozen=True, slots=True)
class LossSpike(_Level):
    """`spike` on the loss, or on an observed value that may be 0 or negative.

    The loss is the value `backward` started from, or what `gw.observe(loss=…)` gave.

    The scale is asinh(loss), which is ln(2·loss) for large losses, linear below 1 (a converged loss of
    0.001 may well be 0.01 on the next batch), and defined for negative ones. `factor` and `window` are as of
    `spike`, and for positive losses only.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "loss_spike"

    of: Literal["loss"] | ObservedColumn = "loss"
    above: Positive = 10.0
    clear_below: Finite | None = None
    half_life: HalfLife = field(default=100, metadata={"rule_key": True})
    factor: Factor | None = None
    window: Window = 100
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    def scale(self, sample: Sample) -> Array32:
        """asinh value; NaN where missing or not finite."""
        usable = sample.present & np.isfinite(sample.values)
        return np.arcsinh(np.where(usable, sample.values, np.nan)).astype(np.float32, copy=False)

    def logs_of(self, values: Sequence[float]) -> Array32 | None:
        """asinh of each."""
        return np.arcsinh(np.array(values, np.float64)).astype(np.float32, copy=False)

    def value(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """sinh x."""
        return np.sinh(x)
