"""A sample against the usual level of its series, by a factor: what a running mean and a constant factor see."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import (
    LARGEST_EXPONENT,
    LOG_OF_ZERO,
    RING,
    Array32,
    ByFactor,
    HalfLife,
    LevelState,
    Warmup,
    absorb,
    deviation,
    empty_level,
    judged,
    log_of,
    log_with_zeros,
    mature,
    restart_level,
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
from gradwatch.records.snapshot import FloatArray


@dataclass(frozen=True, slots=True)
class _OffUsual(ByFactor):
    """Factor by which a sample is off the usual level of its series; `SIGN` +1: above it, -1: below.

    The level is the one of `spike`: the running mean of ln value (a geometric mean), begun anew at the 20th sample from
    the median of those, and outliers are learned from there on only as if they were 3σ̂ away. A sample beyond `above`
    is not learned at all, so a rule fires until the value is back, or the baseline begins anew.
    """

    has_baseline: ClassVar[bool] = True
    takes_logs: ClassVar[bool] = True
    SIGN: ClassVar[int] = 1

    of: NormColumn | ObservedColumn | Literal["loss", "lr"] = "norm"
    above: Positive = 10.0
    clear_below: Positive | None = None
    half_life: HalfLife = field(default=100, metadata={"rule_key": True})
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    def __post_init__(self) -> None:
        ByFactor.__post_init__(self)
        if self.clear_below is not None and self.clear_below < 1:
            raise ValueError("clear_below is a factor as `above` is: 1 is the usual level itself")

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline; what is learned depends on the threshold, too."""
        return (self.kind, self.above, self.half_life, self.warmup)

    def init(self, size: int) -> LevelState:
        """No sample seen."""
        return empty_level(size)

    def scale(self, sample: Sample) -> Array32:
        """ln value; not finite where missing, not finite or not positive."""
        return log_of(sample)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor; NaN while warming up, and for a sample that is missing or not finite."""
        level = cast(LevelState, state)
        return self._factor(level, self.scale(sample))

    def learn(self, state: State, sample: Sample) -> LevelState:
        """Absorb the sample, unless it is beyond `above`."""
        level = cast(LevelState, state)
        return self._absorb(level, self.scale(sample))

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; None where nothing comes near the threshold."""
        return self.advance_logs(state, self.scale(sample))

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance`, of ln value."""
        level = cast(LevelState, state)
        after = self._absorb(level, x)
        off = (x - level.m) * np.float32(self.SIGN)
        if float(np.fmax.reduce(off)) < math.log(self.above) - MARGIN:  # fmax: what is missing is not off
            return None, after
        return self._factor(level, x), after

    def level(self, state: State) -> NDArray[np.float64]:
        """e^m, from the 20th sample on; inf until then."""
        level = cast(LevelState, state)
        with np.errstate(over="ignore"):
            usual = np.exp(level.m.astype(np.float64))
        return np.where(judged(level, min(RING, self.warmup)), usual, np.inf)

    def rebaseline(self, state: State, mask: NDArray[np.bool_], keep_judging: bool) -> LevelState:
        """Warm up again."""
        return restart_level(cast(LevelState, state), mask, self.warmup, keep_judging)

    def _factor(self, level: LevelState, x: Array32) -> NDArray[np.float64]:
        off = self.SIGN * (x.astype(np.float64) - level.m)
        factor = np.exp(np.minimum(off, LARGEST_EXPONENT))
        return np.where(judged(level, self.warmup) & np.isfinite(x), factor, np.nan)

    def _absorb(self, level: LevelState, x: Array32) -> LevelState:
        beyond = self._factor(level, x) > self.above
        learned = np.where(beyond | (x <= LOG_OF_ZERO), np.float32(np.nan), x)
        enough = mature(self.half_life, self.warmup)
        return absorb(level, learned, deviation(level), self.half_life, enough)


@register_detector
@dataclass(frozen=True, slots=True)
class AboveUsual(_OffUsual):
    """value > above x its usual level: "ten times what it usually is".

    The usual level is a running geometric mean of half-life `half_life`, in which outliers hardly count, and samples
    that breach not at all: it fires until the value is back (`gw.rebaseline()` has it learn the new level). Where a
    series scatters widely use `spike` with `factor`, or `above_recent_max`. A value of 0 is neither judged nor learned.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "above_usual"

    def in_words(self, score: float) -> str:
        """The factor over the usual level."""
        return f"{score:.4g} times its usual level"


@register_detector
@dataclass(frozen=True, slots=True)
class BelowUsual(_OffUsual):
    """value < its usual level / above: "a hundredth of what it usually is".

    As `above_usual`, downward: it fires until the value is back. A value of 0 is judged as 1e-30 and not learned. Blind
    to a fall that takes longer than `half_life`, which the level follows (use `drop`, `fade`). Default: a tenth, for 20
    samples.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "below_usual"
    default_for: ClassVar[int] = 20
    SIGN: ClassVar[int] = -1

    def in_words(self, score: float) -> str:
        """The factor below the usual level."""
        return f"{score:.4g} times below its usual level"

    def scale(self, sample: Sample) -> Array32:
        """ln value, of 0 that of 1e-30; not finite where missing, not finite or negative."""
        return log_with_zeros(sample)
