"""Numbers taken of the elements of a CPU tensor a chunk at a time, so that several cost one pass over memory.

One thread, and float32 as far as it holds: sums of a row at most, added up in float64; float64 where squares would
underflow or overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.layouts import dense, flat
from gradwatch.reading.row_sums import ROW, UNDERFLOW, silently

CHUNK = 1 << 16
"""Elements; 256 KiB of float32, which stay in a second-level cache together with a copy of them."""

_vecdot: Any = getattr(np, "vecdot", None)  # numpy 2.0


def chunks(tensor: Tensor) -> Iterable[NDArray[Any]]:
    """The elements of a CPU tensor of any layout and dtype as vectors of float32, or float64 where they are."""
    vector = flat(dense(tensor))
    if vector.dtype is torch.float32 or vector.dtype is torch.float64:
        values = vector.numpy()  # sync: CPU tensor
        if values.size <= CHUNK:
            return (values,) if values.size else ()
        return (values[start : start + CHUNK] for start in range(0, values.size, CHUNK))
    parts = vector.split(CHUNK) if vector.numel() else ()
    return (part.float().numpy() for part in parts)  # sync: CPU tensor


def zeros_and_largest(tensor: Tensor) -> tuple[int, float]:
    """(number of elements that are exactly zero, largest magnitude or NaN if any element is)."""
    zeros, largest = 0, 0.0
    for values in chunks(tensor):
        zeros += values.size - int(np.count_nonzero(values != 0))
        high = max(float(values.max()), -float(values.min()))  # NaN if any element is
        largest = high if high > largest or high != high else largest
    return zeros, largest


def norm(tensor: Tensor) -> float:
    """L2 norm."""
    return math.sqrt(sum(silently(list, map(_sum_of_squares, chunks(tensor)))))


def norms_of_change(new: Tensor, old: Tensor) -> tuple[float, float, float]:
    """(‖new − old‖, ‖old‖, ‖new‖) of two tensors of one shape and dtype, in one pass."""
    return silently(_norms_of_change, new, old)


def _norms_of_change(new: Tensor, old: Tensor) -> tuple[float, float, float]:
    change = before = after = 0.0
    for values, was in zip(chunks(new), chunks(old), strict=True):
        change += _sum_of_squares(values - was)
        before += _sum_of_squares(was)
        after += _sum_of_squares(values)
    return math.sqrt(change), math.sqrt(before), math.sqrt(after)


def _sum_of_squares(values: NDArray[Any]) -> float:
    size = values.size
    if size <= ROW:
        total = float(np.vdot(values, values))
    else:  # no longer than a row: numpy's BLAS shares longer ones out among threads of its own
        whole = size - size % ROW
        rest, rows = values[whole:], values[:whole].reshape(-1, ROW)
        sums = [np.vdot(row, row) for row in rows] if _vecdot is None else _vecdot(rows, rows)
        total = float(np.vdot(rest, rest)) + float(np.add.reduce(sums, dtype=np.float64))
    if UNDERFLOW * size <= total < math.inf:
        return total
    # Zeros, or beyond what float32 can square: every float32 squared is a float64.
    return float(np.add.reduce(np.square(values, dtype=np.float64)))
