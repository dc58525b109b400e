"""A training that has converged: its loss has come down, for good, to a small part of what it was."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import ZERO_NORM, Array32, HalfLife, Warmup, gain
from gradwatch.detectors.detector import (
    MARGIN,
    STRICT,
    Exceeding,
    NormColumn,
    ObservedColumn,
    Sample,
    Scope,
    State,
    register_detector,
)
from gradwatch.detectors.recent_extremes import Factor
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.snapshot import BoolArray, FloatArray

CLAMP = 2.0
"""Nats by which a sample may be off the level, at most, to be learned as it is: a fall in one step by 1e5 is learned in
more than a hundred steps, by when the rules on falls have judged it."""
SCATTER = 0.5
"""Mean of abs(x - m) in nats: below it the loss neither falls nor jumps, and rules on levels know what is usual."""
SLOWER = 5
"""The scatter is learned over so many half-lives of the level: a fault is judged before its own scatter counts."""
FAR = 1.0
"""Nats that a sample adds to the scatter, at most: a fall from the start is forgotten soon."""
ROUNDING = 1e12
"""So many times below its largest level a squared error in float32 is rounding, however steady."""
NONE = np.float32(-1e4)
"""Stands for no largest level yet."""

_ROUNDED = math.log(ROUNDING)


class ConvergedState(NamedTuple):
    """Of K series: `n` samples learned (int32, counted as far as it matters), `m` the level, `s` its scatter, `top`."""

    n: NDArray[np.int32]
    m: Array32
    s: Array32
    top: Array32


@register_detector
@dataclass(frozen=True, slots=True)
class Converged(Exceeding):
    """exp(top - max(m, x)) > above, with x = ln value: level and sample are that many times below the largest level.

    m += a·clip(x - m, ±2) with a = max(1 - 2^(-1/half_life), 1/(n + 1)); `top` is the largest m once `warmup` samples
    are known. The score is 0 where the loss is steady: s += b·(min(abs(x - m), 1) - s), b of five half-lives, is not
    above 0.5, and level and sample are less than 1e12 times below. 0 counts as 1e-30, a negative value as none.

    For `unless:`: rules on levels say nothing of use where a fit interpolates, a hinge is satisfied or no reward comes,
    and all that is left is rounding and rare samples. A floor of noise, however far below the start, is steady.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "converged"
    has_baseline: ClassVar[bool] = True
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["loss"] | NormColumn | ObservedColumn = "loss"
    above: Factor = 1e5
    clear_below: Positive | None = None
    half_life: HalfLife = field(default=20, metadata={"rule_key": True})
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline, which does not depend on the threshold."""
        return (self.kind, self.half_life, self.warmup)

    def init(self, size: int) -> ConvergedState:
        """No sample seen."""
        zero = np.zeros(size, np.float32)
        return ConvergedState(np.zeros(size, np.int32), zero, zero.copy(), np.full(size, NONE))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor; NaN while warming up, and for a sample that is missing, negative or not finite."""
        return self._factor(cast(ConvergedState, state), _log_of(sample))

    def learn(self, state: State, sample: Sample) -> ConvergedState:
        """Move the level."""
        return self._learned(cast(ConvergedState, state), _log_of(sample))

    def _learned(self, before: ConvergedState, x: Array32) -> ConvergedState:
        known = np.isfinite(x)
        a = np.maximum(gain(self.half_life), 1.0 / (before.n + 1.0)).astype(np.float32)
        d = np.where(known, x, before.m) - before.m
        d = np.where(before.n > 0, np.clip(d, np.float32(-CLAMP), np.float32(CLAMP)), d)
        b = np.maximum(gain(SLOWER * self.half_life), 1.0 / (before.n + 1.0)).astype(np.float32)
        far = np.where(known & (before.n > 0), np.minimum(np.abs(d), np.float32(FAR)), before.s)
        spread = before.s + b * (far - before.s)
        m = before.m + a * d
        n = np.minimum(before.n + known, _enough(self.half_life, self.warmup)).astype(np.int32)
        return ConvergedState(n, m, spread, np.where(n >= self.warmup, np.maximum(before.top, m), before.top))

    def logs_of(self, values: Sequence[float]) -> Array32 | None:
        """ln of each; None where one is negative."""
        if min(values) < 0:
            return None
        return np.array(
            [*map(math.log, [value if value > ZERO_NORM else ZERO_NORM for value in values])], np.float32
        )

    def advance_logs(self, state: State, x: Array32) -> tuple[FloatArray | None, State]:
        """As `advance` of samples with these logarithms, all known."""
        before = cast(ConvergedState, state)
        if len(x) == 1:
            below, after = self._of_one(before, x)
            if below:
                return None, after
        return self._factor(before, x), self._learned(before, x)

    def advance_many_logs(self, state: State, x: Array32) -> tuple[int, State]:
        """As `advance_logs` of each in turn; in plain floats where it is one series."""
        if x.shape[1] == 1:
            return self._of_one(cast(ConvergedState, state), x[:, 0])
        return Exceeding.advance_many_logs(self, state, x)

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> ConvergedState:
        """Start over; a level goes on being known across a change that keeps judging."""
        if keep_judging:
            return cast(ConvergedState, state)
        fresh = self.init(len(mask))
        return ConvergedState(*(np.where(mask, new, old) for new, old in zip(fresh, state, strict=True)))

    def _factor(self, state: ConvergedState, x: Array32) -> NDArray[np.float64]:
        down = state.top.astype(np.float64) - np.maximum(state.m, x).astype(np.float64)
        moves = (state.s > np.float32(SCATTER)) | (down > _ROUNDED)
        factor = np.where(moves, np.exp(np.minimum(down, 700.0)), 0.0)
        return np.where((state.n >= self.warmup) & np.isfinite(x), factor, np.nan)

    def _of_one(self, state: ConvergedState, x: Array32) -> tuple[int, ConvergedState]:
        """Count the first of x[T] of a single series that surely do not breach; every result rounded to float32."""
        n, m, s, top, below = state.n.item(), state.m.item(), state.s.item(), state.top.item(), 0
        slow = gain(SLOWER * self.half_life)
        steady, enough, most = gain(self.half_life), _enough(self.half_life, self.warmup), _surely(self.above)
        cell = array("f", (0.0,))  # what is put into it is rounded to float32
        for value in x.tolist():
            down = top - (value if value > m else m)
            if n >= self.warmup and down > most and (s > SCATTER or down > _ROUNDED - MARGIN):
                break
            cell[0] = steady if n >= enough else max(steady, 1.0 / (n + 1.0))
            a = cell[0]
            cell[0] = value - m
            d = max(min(cell[0], CLAMP), -CLAMP) if n else cell[0]
            if n:
                cell[0] = max(slow, 1.0 / (n + 1.0))
                b = cell[0]
                cell[0] = min(abs(d), FAR) - s
                cell[0] = b * cell[0]
                cell[0] = s + cell[0]
                s = cell[0]
            cell[0] = a * d
            cell[0] = m + cell[0]
            m, below = cell[0], below + 1
            n = n if n >= enough else n + 1
            top = m if m > top and n >= self.warmup else top
        if not below:
            return 0, state
        counts = state.n if n == enough == state.n.item() else np.array([n], np.int32)
        largest = state.top if top == state.top.item() else np.array([top], np.float32)
        return below, ConvergedState(counts, np.array([m], np.float32), np.array([s], np.float32), largest)


@cache
def _enough(half_life: int, warmup: int) -> int:
    """Samples from which on the weight of the next one is the same, and none need be counted."""
    return max(warmup, math.ceil(1.0 / gain(SLOWER * half_life)))


@cache
def _surely(above: float) -> float:
    """ln of the factor below which no sample breaches, whatever float32 has rounded."""
    return math.log(above) - MARGIN


def _log(value: float) -> float:
    return math.log(max(value, ZERO_NORM))


def _log_of(sample: Sample) -> Array32:
    """ln value as float32[K]; NaN where it is missing, not finite or negative."""
    usable = sample.present & (sample.values >= 0) & (sample.values < math.inf)
    return np.array(
        [_log(float(value)) if here else math.nan for value, here in zip(sample.values, usable, strict=True)],
        np.float32,
    )
