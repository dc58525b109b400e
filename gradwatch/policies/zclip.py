"""Clipping what is unusual against an exponentially weighted mean and variance of the norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.policies.norm import EPSILON, clip_coefficients
from gradwatch.policies.policy import (
    Coefficients,
    Count,
    Floats,
    Policy,
    Positive,
    Share,
    State,
    register_policy,
    usable,
)
from gradwatch.records.snapshot import BoolArray


class ZClipState(NamedTuple):
    """`n[K]` norms learned, counted up to `warmup`; `mean[K]` and `variance[K]` (population) of the norms."""

    n: NDArray[np.int32]
    mean: Floats
    variance: Floats


@register_policy
@dataclass(frozen=True, slots=True)
class ZClip(Policy):
    """Clip a norm whose z exceeds the threshold, the harder the further off it is (Kumar et al. 2025).

    z = (norm - mean) / (sd + 1e-6); where z > `z`, the bound is mean + z_threshold·sd·(z_threshold / z), and that
    bound is learned in the norm's stead. Every step is bounded by `max_norm` too, the first `warmup` by that alone: a
    norm that is usually above it is clipped at every step. `max_norm: null` leaves the statistics alone.
    The baseline is linear and its sd is learned from clipped values, so that it clips ever more of a heavy-tailed
    run; `baseline` works on logarithms and touches anomalies only. The reference is
    https://github.com/bluorion-com/ZClip (mode zscore, adaptive scaling), whose defaults these are; there one NaN
    makes mean and variance NaN for ever, here it is not learned.
    """

    method: ClassVar[str] = "zclip"

    alpha: Share = 0.97
    z: Positive = 2.5
    warmup: Count = 25
    max_norm: Positive | None = 1.0

    def state_key(self) -> tuple[Any, ...]:
        """Key of the state, which does not depend on `max_norm`."""
        return (self.method, self.alpha, self.z, self.warmup)

    def init(self, count: int) -> ZClipState:
        """No norm seen."""
        return ZClipState(np.zeros(count, np.int32), np.zeros(count), np.zeros(count))

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """Against the stricter of the adaptive bound and `max_norm`."""
        bounds = self._bounds(cast(ZClipState, state), norms)
        if self.max_norm is not None:
            bounds = np.minimum(bounds, self.max_norm)
        factors = clip_coefficients(norms, bounds, present)
        # Past warm-up the reference leaves a norm at or below its bound alone, to the last bit.
        return np.where(
            (cast(ZClipState, state).n >= self.warmup) & (norms <= bounds), np.float32(1), factors
        )

    def _bounds(self, state: ZClipState, norms: Floats) -> Floats:
        """float64[K]: the adaptive bound; inf while warming up and where nothing is unusual."""
        sd = np.sqrt(state.variance)
        with np.errstate(all="ignore"):
            score = (norms - state.mean) / (sd + float(EPSILON))
            bound = state.mean + self.z * sd * (self.z / score)
        # NaN is not unusual here: it is not clipped at all.
        return np.where((state.n >= self.warmup) & (score > self.z), bound, np.inf)

    def learn(self, state: State, norms: Floats, present: BoolArray) -> ZClipState:
        """Mean and variance of the first `warmup` norms, then exponentially weighted ones."""
        before = cast(ZClipState, state)
        known = usable(norms, present)
        warming = before.n < self.warmup
        x = np.where(known, np.minimum(norms, self._bounds(before, norms)), before.mean)
        n = before.n + known
        weight = np.where(warming, 1.0 / np.maximum(n, 1), 1.0 - self.alpha)
        mean = before.mean + weight * (x - before.mean)
        # The published variance takes the deviation from the mean it has just moved; warming up it is exact.
        squares = np.where(warming, (x - before.mean) * (x - mean), np.square(x - mean))
        variance = before.variance + weight * (squares - before.variance)
        return ZClipState(
            np.minimum(n, self.warmup).astype(np.int32),
            np.where(known, mean, before.mean),
            np.where(known, variance, before.variance),
        )
