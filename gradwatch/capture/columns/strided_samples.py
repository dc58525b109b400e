"""Tensors as rows: whole, or a strided sample of each; and numbers taken of them, on their way to the host.

Samples of equally many elements are stacked, so that all of them cost a few operations however many parameters there
are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.device import AsyncCopy, Number
from gradwatch.reading.layouts import dense, flat

SAMPLE = 4096
"""Elements of a tensor in its strided sample, at most."""


def whole_rows(tensors: Sequence[Tensor]) -> tuple[list[Tensor], NDArray[np.intp]]:
    """(each tensor as one row [1, m], its position)."""
    return [flat(dense(tensor)).unsqueeze(0) for tensor in tensors], np.arange(len(tensors))


def sampled_rows(tensors: Sequence[Tensor]) -> tuple[list[Tensor], NDArray[np.intp]]:
    """(stacks [n, m] of samples with equal m, dtype and device, the position of every row)."""
    buckets: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for k, tensor in enumerate(tensors):
        vector = flat(dense(tensor))
        stride = max(1, -(-vector.numel() // SAMPLE))
        sample = vector[::stride]
        key = (sample.numel(), sample.dtype, sample.device)
        buckets.setdefault(key, []).append((k, sample))
    order = np.array([k for bucket in buckets.values() for k, _ in bucket], np.intp)
    return [torch.stack([sample for _, sample in bucket]) for bucket in buckets.values()], order


def norm_factors(params: Sequence[Tensor]) -> NDArray[np.float32]:
    """By what the norm of a strided sample is multiplied to stand for that of its tensor."""
    numels = np.array([max(1, dense(param).numel()) for param in params], np.float64)
    strides = np.maximum(1, np.ceil(numels / SAMPLE))
    taken = np.ceil(numels / strides)
    return np.sqrt(np.maximum(numels / np.minimum(numels, taken), 1)).astype(np.float32)


def row_norms(row: Tensor) -> Tensor:
    """[n] L2 norms of the rows of a matrix [n, m]."""
    norms: Tensor = torch.linalg.vector_norm(row, dim=1, dtype=accumulator(row))
    return norms


def accumulator(row: Tensor) -> torch.dtype:
    """float32, or float64 for a float64 tensor."""
    return torch.promote_types(row.dtype, torch.float32)


def start_copy(
    parts: Sequence[Tensor],
    positions: NDArray[np.intp],
    count: int,
    factor: NDArray[np.float32] | None = None,
    scale: Number = 1.0,
) -> AsyncCopy:
    """Numbers on their way to the host, in one copy from each device and of each dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, NDArray[np.intp]]]] = {}
    start = 0
    for part in parts:
        alike.setdefault((part.device, part.dtype), []).append((part, positions[start : start + len(part)]))
        start += len(part)
    places = [place for group in alike.values() for _, place in group]
    joined = [torch.cat([part for part, _ in group]) for group in alike.values()]
    return AsyncCopy(joined, np.concatenate(places) if places else positions[:0], count, factor, scale)
