"""One rank against the others: a local gradient out of line, or replicas that are none any more.

Series are ranks here, W of them, so these kinds take neither `scope` nor `groups`. They need the ranks to talk
and are inactive where there is one, or where ranks hold different parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.baseline import (
    ZERO_NORM,
    Array32,
    HalfLife,
    LevelState,
    Robust,
    Warmup,
    absorb,
    deviation,
    judged,
    mature,
    restart_level,
)
from gradwatch.detectors.detector import STRICT, Detector, Sample, Scope, State, register_detector
from gradwatch.detectors.thresholds import Finite, Positive
from gradwatch.records.snapshot import BoolArray


@register_detector
@dataclass(frozen=True, slots=True)
class RankOutlier(Robust):
    """A rank whose local gradient is out of line with the other ranks', before the reduction spreads it.

    r_k = ln n_k - median over ranks of ln n, n_k being the L2 norm of rank k's local gradients (all
    parameters, largest micro-batch of each); then z as in `spike`, on each rank's own r, less the median over
    ranks of r - m: one rank that leaves must not move the middle and so all the others. Fires where |z| > 8,
    of two ranks only where z > 8 (their r are opposites, so that one of them falls when the other rises).
    A rank alone in being NaN or Inf scores infinity, from the first step on. Use `rank_mismatch` for ranks
    that no longer hold the same weights.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "rank_outlier"
    elementwise: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("param",)

    of: Literal["norm_local"] = "norm_local"
    above: Positive = 8.0
    clear_below: Finite | None = None
    half_life: HalfLife = field(default=100, metadata={"rule_key": True})
    warmup: Warmup = field(default=20, metadata={"rule_key": True})

    @property
    def columns(self) -> tuple[str, ...]:
        """The local norm of every rank."""
        return ("rank_norm",)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """|z| of each rank, +inf of one that is not finite while another is; NaN where there is no judgement.

        0 while warming up: a rank that was not finite must be able to recover before it has a baseline.
        """
        level = cast(LevelState, state)
        r = _ratio(level, sample)
        z = ((r - level.m) / deviation(level)).astype(np.float64)
        z = z if len(r) == 2 else np.abs(z)
        z = np.where(judged(level, self.warmup) | np.isnan(r), z, 0.0)
        finite = np.isfinite(sample.values)
        alone: BoolArray = sample.present & ~finite & bool((sample.present & finite).any())
        return np.where(alone, math.inf, z)

    def learn(self, state: State, sample: Sample) -> LevelState:
        """Absorb each rank's r, winsorised once 20 are known."""
        level = cast(LevelState, state)
        enough = mature(self.half_life, self.warmup)
        return absorb(level, _ratio(level, sample), deviation(level), self.half_life, enough)

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> LevelState:
        """Start over, unless it is to keep judging: what steers all ranks alike changes no ratio of theirs."""
        level = cast(LevelState, state)
        return level if keep_judging else restart_level(level, mask, self.warmup, keep_judging)


def _ratio(level: LevelState, sample: Sample) -> Array32:
    """r[W] in nats, float32, shifted so that most ranks are where they usually are.

    NaN where missing, not finite, or where there is no other rank.
    """
    usable = sample.present & (sample.values >= 0) & (sample.values < math.inf)
    if np.count_nonzero(usable) < 2:
        return np.full(len(usable), np.float32(np.nan))
    x = np.log(np.maximum(np.where(usable, sample.values, 1.0), ZERO_NORM))
    r = x - np.median(x[usable])
    r -= np.median((r - level.m)[usable])
    return np.where(usable, r, np.nan).astype(np.float32)


@register_detector
@dataclass(frozen=True, slots=True)
class RankMismatch(Detector):
    """A rank whose reduced norms are not, bit by bit, those of the other replicas.

    Under DDP every rank gets the same reduced gradient, so one different bit means that the ranks train
    different models: a missed reduction, a corrupted transfer, another `DistributedDataParallel` than one
    thinks. The value is the number of parameters that differ. The rank that differs from the majority is
    named; all of them where there is none. Machines of different kinds may add up in another order: then
    switch the rule off.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "rank_mismatch"
    scopes: ClassVar[tuple[Scope, ...]] = ("param",)

    of: Literal["norm"] = "norm"

    @property
    def columns(self) -> tuple[str, ...]:
        """Number of parameters that differ, by rank."""
        return ("rank_mismatch",)

    @property
    def fires_at(self) -> float:
        """Any parameter that differs."""
        return 0.0

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The number of parameters that differ; NaN where ranks were not compared."""
        return np.where(sample.present, sample.values.astype(np.float64), np.nan)

    @property
    def safe(self) -> tuple[float, float]:
        """None differs."""
        return -math.inf, 0.0
