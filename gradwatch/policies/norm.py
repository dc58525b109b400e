"""Clipping by a norm, exactly as torch does it: of each parameter, of each group, or of all together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.policies.norm_bound import Bound
from gradwatch.policies.policy import (
    LARGEST,
    Coefficients,
    Floats,
    Policy,
    Positive,
    State,
    finite,
    register_policy,
)
from gradwatch.records.snapshot import BoolArray

EPSILON = np.float32(1e-6)
"""Added to the norm, as in `torch.nn.utils.clip_grad_norm_`."""
ONE = np.float32(1)


@register_policy
@dataclass(frozen=True, slots=True)
class ClipByNorm(Policy):
    """Multiply by min(1, max_norm / (norm + 1e-6)).

    A constant that you choose: gradients of a healthy run that exceed it are clipped too. Use `baseline` to act on
    anomalies only, `autoclip`, or `zclip` with `max_norm: null`, to have the bound follow the run. The reference is
    `torch.nn.utils.clip_grad_norm_` (norm_type 2): bit-equal given the same norm, except for a non-finite one,
    which torch would spread to every gradient.
    """

    method: ClassVar[str] = "norm"

    max_norm: Positive = 1.0

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """Coefficients of K norms, as `clip_coefficient`."""
        return clip_coefficients(norms, self.max_norm, present)

    def bound(self, state: State, roots: Floats) -> Bound:
        """Upper bound `max_norm`."""
        most = np.full(len(roots), self.max_norm)
        return Bound(np.full(len(roots), -np.inf), most, most)

    def constant_bound(self) -> float:
        """`max_norm`."""
        return self.max_norm


def clip_coefficient(total_norm: float, max_norm: float) -> np.float32:
    """float32 multiplier min(1, max_norm / (total_norm + 1e-6)); 1 where the norm is NaN or infinite.

    torch computes `max_norm / tensor` as reciprocal times scalar, all in float32; so does this. A NaN or
    Inf norm gives 1, not NaN or 0: clipping must never spread one bad element over all parameters.
    """
    if not math.isfinite(total_norm):
        return ONE
    if total_norm > LARGEST:  # of finite elements: where torch's float32 norm is infinite, ours is known
        return min(ONE, np.float32(max_norm / total_norm))
    norm = np.float32(total_norm)
    return min(ONE, ONE / (norm + EPSILON) * np.float32(max_norm))


def clip_coefficients(norms: Floats, bounds: Floats | float, present: BoolArray) -> Coefficients:
    """float32[K] `clip_coefficient` of K norms, each against its own bound (inf = none); 1 where missing."""
    known = finite(norms, present)
    held = np.where(known, norms, 0.0)
    beyond = held > LARGEST
    narrow = np.where(beyond, 0.0, held).astype(np.float32)
    with np.errstate(over="ignore"):
        factors = np.minimum(ONE, ONE / (narrow + EPSILON) * np.asarray(bounds, np.float32))
        if beyond.any():
            wide = np.minimum(1.0, bounds / np.where(beyond, held, 1.0)).astype(np.float32)
            factors = np.where(beyond, wide, factors)
    return np.where(known, factors, ONE)
