"""The norm of a single CPU gradient, right over the whole range of its numbers."""

from __future__ import annotations

import math

from torch import Tensor

from gradwatch.reading.batched_norms import Detail, inspect, sum_of_squares
from gradwatch.reading.row_sums import UNDERFLOW


def exact_norm(grad: Tensor) -> tuple[float, Detail | None]:
    """The L2 norm, and the second look where the first may have over- or underflowed.

    The batched read of `batched.CpuReader` does the same for many gradients at once.
    """
    square = sum_of_squares(grad)
    if UNDERFLOW * grad.numel() <= square < math.inf:
        return math.sqrt(square), None
    detail = inspect(grad)
    return detail.norm, detail


def norm_of(grad: Tensor | None) -> float:
    """The L2 norm, 0 without a gradient."""
    return 0.0 if grad is None else exact_norm(grad)[0]
