"""A value that improves no more: its running mean has had no new best for many samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import HalfLife, Warmup, gain
from gradwatch.detectors.detector import (
    STRICT,
    Comparison,
    Detector,
    ObservedColumn,
    Sample,
    Scope,
    State,
    register_detector,
)
from gradwatch.detectors.recent_extremes import Window
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.columns import scalar_name
from gradwatch.records.snapshot import BoolArray, FloatArray

MOST = np.int32(1 << 30)
"""Samples are counted up to here: more than a rule can wait for."""


class PlateauState(NamedTuple):
    """Of K series: `n` samples learned (int32, up to the warm-up), the mean `m`, the `best` of it, samples `since`."""

    n: NDArray[np.int32]
    m: NDArray[np.float64]
    best: NDArray[np.float64]
    since: NDArray[np.int32]


@register_detector
@dataclass(frozen=True, slots=True)
class Plateau(Detector):
    """The running mean has not become better, by the part `by` of its best, for `steps` samples.

    m += a·(x - m) with a = max(1 - 2^(-1/half_life), 1/(n + 1)). Where m < best - by·abs(best) it is the new best (with
    `better: higher` m > best + by·abs(best)): so a slow fall adds up until it counts, and one lucky batch does not.
    The score is the number of samples since then. Samples that are not finite are none. Nothing is counted during the
    warm-up, whose last sample is the first best: it fires at the (`warmup` + `steps`)-th sample at the earliest, the
    step `warmup` + `steps` - 1 where every step has a value.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "plateau"
    has_baseline: ClassVar[bool] = True
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    steps: Window = 1000
    by: Positive = 0.01
    of: Literal["loss"] | ObservedColumn = "loss"
    better: Literal["lower", "higher"] = "lower"
    half_life: HalfLife = field(default=20, metadata={"rule_key": True})
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    @property
    def comparison(self) -> Comparison:
        """A count is reached."""
        return "at_least"

    @property
    def fires_at(self) -> float:
        """As many samples without a new best."""
        return float(self.steps)

    def in_words(self, score: float) -> str:
        """The samples without a new best."""
        return f"no better than {score:.0f} samples ago"

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the baseline, which does not depend on the count at which it fires."""
        return (self.kind, self.by, self.better, self.half_life, self.warmup)

    def init(self, size: int) -> PlateauState:
        """No sample seen."""
        count, zero = np.zeros(size, np.int32), np.zeros(size)
        return PlateauState(count, zero, zero.copy(), count.copy())

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """Samples since the last best, this one included; NaN while warming up, and without a finite sample."""
        return self.advance(state, sample)[0]

    def advance(self, state: State, sample: Sample) -> tuple[NDArray[np.float64], PlateauState]:
        """The score, and the state with the sample."""
        after = self.learn(state, sample)
        judged = sample.present & np.isfinite(sample.values) & (after.n >= self.warmup)
        return np.where(judged, after.since, np.nan), after

    def learn(self, state: State, sample: Sample) -> PlateauState:
        """Move the mean, and count the samples since its last best."""
        before = cast(PlateauState, state)
        known = sample.present & np.isfinite(sample.values)
        a = np.maximum(gain(self.half_life), 1.0 / (before.n + 1.0))
        m = np.where(known, before.m + a * (np.where(known, sample.values, before.m) - before.m), before.m)
        n = np.minimum(before.n + known, max(self.warmup, 1)).astype(np.int32)
        least = self.by * np.abs(before.best)
        better = m < before.best - least if self.better == "lower" else m > before.best + least
        begins = known & (better | (before.n < max(self.warmup, 1)))
        since = np.where(begins, 0, before.since + known).astype(np.int32)
        return PlateauState(n, m, np.where(begins, m, before.best), np.minimum(since, MOST).astype(np.int32))

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """As `advance` of steps with these one-per-step values in turn, up to the first that may breach."""
        before = cast(PlateauState, state)
        n, m, best, since = (one.item() for one in before)
        name, steady, sign = (
            scalar_name(self.of),
            gain(self.half_life),
            1.0 if self.better == "lower" else -1.0,
        )
        passed = 0
        for values in steps:
            value = values.get(name, math.nan)
            if math.isfinite(value):
                mean = m + max(steady, 1.0 / (n + 1.0)) * (value - m)
                begins = n < max(self.warmup, 1) or sign * mean < sign * best - self.by * abs(best)
                if not begins and since + 1 >= self.steps:
                    break
                m, best, since = (mean, mean, 0) if begins else (mean, best, min(since + 1, int(MOST)))
                n = min(n + 1, max(self.warmup, 1))
            passed += 1
        counts = np.array([n], np.int32), np.array([since], np.int32)
        return passed, PlateauState(counts[0], np.array([m]), np.array([best]), counts[1])

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> PlateauState:
        """Start over; a best goes on being known across a change that keeps judging."""
        if keep_judging:
            return cast(PlateauState, state)
        before = cast(PlateauState, state)
        counts = [np.where(mask, 0, one).astype(np.int32) for one in (before.n, before.since)]
        return before._replace(
            n=counts[0], since=counts[1]
        )  # the next sample is the mean, and the best of it

    def shown(self, state: State, sample: Sample) -> FloatArray:
        """The running mean, which is what the score is about."""
        return self.learn(state, sample).m
