"""Bounds: what a tensor hook needs to know of its parameter to multiply a gradient by itself. No torch.

Everything that acts inside the backward by a factor made of one parameter's norm comes down to this form: rules that
clip (`gradwatch.engine.baseline_bounds`), and the policies norm, block_rms, baseline and normalize.

Axes: S sites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGEST = float(np.finfo(np.float32).max)

Array64 = NDArray[np.float64]


class Bound(NamedTuple):
    """A norm outside [low, high] is multiplied by target / (norm + eps), at most 1 unless it `enlarges`.

    `low[S]`, `high[S]` and `target[S]` are norms, loss scale removed; a site with high = inf and low <= 0 is left
    alone. A norm of 0, or one that is not finite, is never multiplied.
    """

    low: Array64
    high: Array64
    target: Array64
    eps: float = 1e-6
    enlarges: bool = False

    def at(self, own: NDArray[np.intp]) -> Bound:
        """The same bound for the sites that `own` picks."""
        return self._replace(low=self.low[own], high=self.high[own], target=self.target[own])


@dataclass(frozen=True, slots=True)
class SiteBound:
    """A Bound at one site, in plain numbers."""

    low: float
    high: float
    target: float
    eps: float
    enlarges: bool

    def factor(self, norm: float) -> float | None:
        """The float32 multiplier for a finite norm above 0; None where this bound says nothing of it.

        The arithmetic of `gradwatch.policies.norm.clip_coefficient`: a reciprocal times a number, in float32.
        """
        if self.low <= norm <= self.high:
            return None
        if norm > LARGEST:
            wide = np.float32(self.target / norm)
            return float(wide if self.enlarges else min(np.float32(1), wide))
        with np.errstate(over="ignore"):
            found = np.float32(1) / (np.float32(norm) + np.float32(self.eps)) * np.float32(self.target)
        return float(min(np.float32(LARGEST if self.enlarges else 1), found))


def factor_of(bounds: tuple[SiteBound, ...], norm: float) -> float:
    """The smallest factor of those bounds that say anything; 1 where none does, or the norm is 0 or not finite."""
    if not 0 < norm < math.inf:
        return 1.0
    factors = [factor for bound in bounds if (factor := bound.factor(norm)) is not None]
    return min(factors) if factors else 1.0


def at_site(bounds: tuple[Bound, ...], k: int) -> tuple[SiteBound, ...]:
    """Bounds of site k, in plain numbers."""
    return tuple(
        SiteBound(float(low[k]), float(high[k]), float(target[k]), eps, enlarges)
        for low, high, target, eps, enlarges in bounds
        if high[k] < np.inf or low[k] > 0
    )
