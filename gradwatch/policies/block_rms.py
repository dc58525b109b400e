"""Clipping each parameter by its root mean square."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from gradwatch.policies.norm_bound import Bound
from gradwatch.policies.policy import Coefficients, Floats, Policy, Positive, State, finite, register_policy
from gradwatch.records.snapshot import BoolArray


@register_policy
@dataclass(frozen=True, slots=True)
class BlockRMS(Policy):
    """Divide each parameter's gradient by max(1, rms / threshold), rms = norm/√numel.

    As `norm` with `scope: param`, but with a bound that grows with the tensor. The reference is
    `optax.clip_by_block_rms`; 1 is the threshold of Adafactor (Shazeer and Stern 2018).
    """

    method: ClassVar[str] = "block_rms"
    of: ClassVar[Literal["norm", "rms"]] = "rms"
    scoped: ClassVar[bool] = False

    threshold: Positive = 1.0

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """`norms[K]` are root mean squares here."""
        found = np.where(finite(norms, present), norms, 0.0)
        return (1.0 / np.maximum(1.0, found / self.threshold)).astype(np.float32)

    def bound(self, state: State, roots: Floats) -> Bound:
        """A norm of threshold·√numel."""
        most = self.threshold * roots
        return Bound(np.full(len(roots), -np.inf), most, most, eps=0.0)
