"""Scaling gradients to a norm, larger or smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.policies.norm_bound import Bound
from gradwatch.policies.policy import (
    LARGEST,
    Coefficients,
    Floats,
    NotNegative,
    Policy,
    Positive,
    State,
    finite,
    register_policy,
)
from gradwatch.records.snapshot import BoolArray


@register_policy
@dataclass(frozen=True, slots=True)
class Normalize(Policy):
    """Multiply by target / (norm + eps): always, or only where the norm lies outside [low, high].

    The one method whose factor may exceed 1; a norm of 0 is left alone. Where another policy covers the same
    parameter the smaller factor is applied, so that a cap holds. It hides vanishing and exploding from the
    optimizer, not from the rules, which see the norm before it. Formula: the update direction of normalised
    gradient descent; defaults are ours.
    """

    method: ClassVar[str] = "normalize"
    enlarges: ClassVar[bool] = True

    target: Positive = 1.0
    eps: Positive = 1e-6
    low: NotNegative | None = None
    high: Positive | None = None

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """Such that the norm becomes `target`, as far as `eps` lets it."""
        meant = finite(norms, present) & (norms > 0)
        if self.low is not None or self.high is not None:
            low = 0.0 if self.low is None else self.low
            high = np.inf if self.high is None else self.high
            meant &= (norms < low) | (norms > high)
        factors = self.target / (np.where(meant, norms, 1.0) + self.eps)
        return np.where(meant, np.minimum(factors, LARGEST), 1.0).astype(np.float32)

    def bound(self, state: State, roots: Floats) -> Bound:
        """Outside [low, high], or everywhere: an interval that no norm is in."""
        always = self.low is None and self.high is None
        low = np.inf if always else 0.0 if self.low is None else self.low
        high = -np.inf if always else np.inf if self.high is None else self.high
        size = len(roots)
        target = np.full(size, self.target)
        return Bound(np.full(size, low), np.full(size, high), target, self.eps, enlarges=True)
