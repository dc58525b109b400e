"""Clipping each parameter against its own recent, clipped norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.policies.policy import (
    Coefficients,
    Floats,
    Policy,
    Positive,
    Share,
    State,
    Steps,
    finite,
    register_policy,
    usable,
)
from gradwatch.records.snapshot import BoolArray

EPSILON = 1e-8
"""As in the reference, added to the global norm and the least that a norm is taken for."""


class AdaGCState(NamedTuple):
    """`n[K]` norms learned, counted up to `warmup`; `gamma[K]` the usual norm after clipping."""

    n: NDArray[np.int32]
    gamma: Floats


@register_policy
@dataclass(frozen=True, slots=True)
class AdaGC(Policy):
    """Clip each parameter to `ratio` times γ, the moving average of its own clipped norm (Wang et al. 2025).

    min(1, ratio·γ/norm), then γ = beta·γ + (1 - beta)·(clipped norm). While fewer than `warmup` - 1 norms are
    known, all parameters of the policy are clipped together to `max_norm`, and γ is the least of the clipped norms.
    It clips nearly every step of a healthy run a little; use `baseline` with `scope: param` to leave those alone.
    The reference is AdaGC of https://github.com/kozistr/pytorch_optimizer, whose defaults these are. Unlike there,
    a norm of exactly 0 is not learned: γ would be 0, and the parameter be frozen for good.
    """

    method: ClassVar[str] = "adagc"
    scoped: ClassVar[bool] = False

    ratio: Positive = 1.05
    beta: Share = 0.98
    warmup: Steps = 100
    max_norm: Positive = 1.0

    def state_key(self) -> tuple[Any, ...]:
        """The same γ serves any ratio."""
        return (self.method, self.beta, self.warmup)

    def init(self, count: int) -> AdaGCState:
        """No norm seen."""
        return AdaGCState(np.zeros(count, np.int32), np.zeros(count))

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """Together while warming up, each parameter by itself after."""
        return self._factors(cast(AdaGCState, state), norms, finite(norms, present)).astype(np.float32)

    def _factors(self, state: AdaGCState, norms: Floats, known: BoolArray) -> Floats:
        found = np.where(known, norms, 0.0)
        together = min(1.0, self.max_norm / (float(np.sqrt(np.dot(found, found))) + EPSILON))
        apart = self.ratio * np.maximum(state.gamma, EPSILON) / np.maximum(found, EPSILON)
        factors = np.where(self._warming(state), together, np.minimum(1.0, apart))
        return np.where(known, factors, 1.0)

    def _warming(self, state: AdaGCState) -> BoolArray:
        # The reference counts steps from 1 and asks `step < warmup`; it has no γ before the first.
        warming: BoolArray = (state.n + 1 < self.warmup) | (state.n == 0)
        return warming

    def learn(self, state: State, norms: Floats, present: BoolArray) -> AdaGCState:
        """The norm as it is after clipping."""
        before = cast(AdaGCState, state)
        known = usable(norms, present)
        taught = known & (norms > 0)
        after = np.where(taught, norms, 0.0) * self._factors(before, norms, known)
        least = np.where(before.n == 0, after, np.minimum(before.gamma, after))
        average = before.gamma + (1.0 - self.beta) * (after - before.gamma)
        gamma = np.where(self._warming(before), least, average)
        n = np.minimum(before.n + taught, max(self.warmup, 1)).astype(np.int32)
        return AdaGCState(n, np.where(taught, gamma, before.gamma))
