"""Clipping by the total norm, exactly as torch does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.policies.policy import register_policy

LARGEST = float(np.finfo(np.float32).max)
EPSILON = np.float32(1e-6)
"""Added to the norm, as in `torch.nn.utils.clip_grad_norm_`."""


@register_policy
@dataclass(frozen=True, slots=True)
class ClipByNorm:
    """Scale all gradients by min(1, max_norm / (total_norm + 1e-6)).

    The reference is `torch.nn.utils.clip_grad_norm_` (norm_type 2): bit-equal given the same norm, except
    for a non-finite one, which torch would spread to every gradient.
    """

    method: ClassVar[str] = "norm"

    max_norm: float = 1.0

    def coefficient(self, total_norm: float) -> np.float32:
        """The multiplier for a total norm, in float32."""
        return clip_coefficient(total_norm, self.max_norm)


def clip_coefficient(total_norm: float, max_norm: float) -> np.float32:
    """float32 multiplier min(1, max_norm / (total_norm + 1e-6)); 1 where the norm is not finite.

    torch computes `max_norm / tensor` as reciprocal times scalar, all in float32; so does this. A NaN or
    Inf norm gives 1, not NaN or 0: clipping must never spread one bad element over all parameters.
    """
    if not abs(total_norm) <= LARGEST:
        return np.float32(1)
    norm = np.float32(total_norm)
    return min(np.float32(1), np.float32(1) / (norm + EPSILON) * np.float32(max_norm))
