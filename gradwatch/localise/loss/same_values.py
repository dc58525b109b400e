"""Comparison of two tensors, number by number."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def same_values(one: Tensor, other: Tensor) -> bool:
    """True if all elements are equal, NaN and NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
