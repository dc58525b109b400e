"""Clipping anomalies only, back to the edge of what is usual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from gradwatch.detectors import Sample, Spike
from gradwatch.detectors.baseline import LARGEST_EXPONENT, LevelState, deviation
from gradwatch.policies.norm import clip_coefficients
from gradwatch.policies.norm_bound import Bound
from gradwatch.policies.policy import (
    Coefficients,
    Count,
    Floats,
    Policy,
    Positive,
    State,
    finite,
    register_policy,
    usable,
)
from gradwatch.records.snapshot import BoolArray

WIDTHS = 2.0
"""The bound is so many σ̂ above the usual: inside what the run has shown itself to need."""


@register_policy
@dataclass(frozen=True, slots=True)
class Baseline(Policy):
    """Clip to exp(m + 2σ̂) where z > `above`, and leave every other step alone to the last bit.

    m and σ̂ are the robust level and spread of ln norm that the detector `spike` learns (`detectors.baseline`):
    winsorised, so that a spike can neither blind nor jump them; blind for the first `warmup` norms. Use `norm` for
    a cap that holds from the first step. Formula and defaults are ours; measured: no interventions in healthy runs.
    """

    method: ClassVar[str] = "baseline"

    above: Positive = 6.0
    half_life: Count = 100
    warmup: Count = 20

    def state_key(self) -> tuple[Any, ...]:
        """Key of the state, which does not depend on the threshold."""
        return (self.method, self.half_life, self.warmup)

    @property
    def _spike(self) -> Spike:
        return Spike(above=self.above, half_life=self.half_life, warmup=self.warmup)

    def init(self, count: int) -> LevelState:
        """No norm seen."""
        return self._spike.init(count)

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """Against the bound where the norm is an anomaly, 1 elsewhere."""
        known = finite(norms, present)
        anomaly = self._spike.score(state, Sample(norms, known)) > self.above  # NaN, no judgement, is none
        if not anomaly.any():
            return np.ones(len(norms), np.float32)
        return clip_coefficients(norms, self.bounds(cast(LevelState, state)), anomaly)

    def bounds(self, state: LevelState) -> Floats:
        """float64[K]: exp(m + 2σ̂)."""
        edge = state.m.astype(np.float64) + WIDTHS * deviation(state).astype(np.float64)
        return np.exp(np.minimum(edge, LARGEST_EXPONENT))

    def limits(self, state: LevelState) -> Floats:
        """float64[K]: the norm above which z > `above`; inf during warm-up."""
        return self._spike.limit(state)

    def bound(self, state: State, roots: Floats) -> Bound:
        """Upper bound `bounds`, for norms above `limits`."""
        level = cast(LevelState, state)
        return Bound(np.full(len(roots), -np.inf), self.limits(level), self.bounds(level))

    def learn(self, state: State, norms: Floats, present: BoolArray) -> LevelState:
        """Learn as the detector does: winsorised at 3σ̂."""
        return self._spike.learn(state, Sample(norms, usable(norms, present)))
