"""The one batched read of every gradient: L2 norms, exact to 1e-5, at memory bandwidth.

What decides it: one `vector_norm` or `dot` over a whole large tensor adds up to 2^20 squares in one float32
accumulator, and loses digits by that (4e-4 where all elements are equal, which is what a bias of a summed
loss gets). Row norms over 2^13 elements cost the same bandwidth, use every core, and are off by 7e-6 at the
very worst. Many small tensors cost one dispatch each, so equal shapes are stacked first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.hooks.dense import REDUCED, dense, flat

ROW = 1 << 13
FEW = 2048  # row norms whose squares float32 may add up
SMALL = 2048  # elements; above this a stack costs more than the dispatch it saves
BUCKET = 4  # equal shapes needed before stacking pays
# Squares below 2^-126 may be flushed to zero: 1e-5 relative is only certain above this mean square.
UNDERFLOW = 2.0**-126 * 1e5
FLOAT32_MAX = float(np.finfo(np.float32).max)

Squares = NDArray[np.float64]


def sum_of_squares(grad: Tensor) -> float:
    """Sum of squared elements of one CPU gradient of any layout and dtype, accumulated in float64."""
    vector = flat(dense(grad))
    if vector.dtype in REDUCED:
        return math.fsum(_blocks(chunk.float()) for chunk in vector.split(1 << 18))
    return _blocks(vector) if vector.dtype is torch.float32 else _dot(vector)


def _blocks(vector: Tensor) -> float:
    """Sum of squares of a contiguous float32 vector, no more than 2 * ROW of them in one accumulator."""
    numel = vector.numel()
    if numel < 2 * ROW:
        return _dot(vector)
    rows, rest = divmod(numel, ROW)
    body = vector.narrow(0, 0, numel - rest) if rest else vector
    norms = torch.linalg.vector_norm(body.view(rows, ROW), dim=1)
    total = _dot(norms.to(torch.float64) if rows > FEW else norms)
    return total + _dot(vector.narrow(0, numel - rest, rest)) if rest else total


def _dot(vector: Tensor) -> float:
    return torch.dot(vector, vector).item()  # sync: CPU tensor


@dataclass(slots=True)
class _Bucket:
    """Small float32 gradients of one shape: `indices` into the read, and the buffer they are stacked in."""

    indices: NDArray[np.intp]
    pick: operator.itemgetter[Any]
    stacked: Tensor
    rows: Tensor


class CpuReader:
    """Reads the sums of squares of a fixed list of CPU gradients; plans once, then one pass per read."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._singles: list[int] = []
        self._planned = 0

    def read(self, grads: Sequence[Tensor | None]) -> Squares:
        """float64[len(grads)] sums of squares; 0 where a gradient is None."""
        if len(grads) != self._planned:
            self._plan(grads)
        squares: Squares = np.zeros(len(grads))
        for bucket in self._buckets:
            self._read_bucket(bucket, grads, squares)
        for index in self._singles:
            grad = grads[index]
            if grad is not None:
                squares[index] = _single(grad)
        return squares

    def _read_bucket(self, bucket: _Bucket, grads: Sequence[Tensor | None], squares: Squares) -> None:
        members = bucket.pick(grads)
        try:
            # `stack` refuses unequal shapes itself, but would resize `out` if all had changed alike.
            if members[0] is None or members[0].shape != bucket.stacked.shape[1:]:
                raise TypeError
            torch.stack(members, out=bucket.stacked)
        except (TypeError, RuntimeError):
            # Some are missing, sparse or of another shape this time: one by one is always right.
            for index, grad in zip(bucket.indices, members, strict=True):
                squares[index] = 0.0 if grad is None else sum_of_squares(grad)
            return
        norms = torch.linalg.vector_norm(bucket.rows, dim=1).numpy()  # sync: CPU tensor
        squares[bucket.indices] = np.square(norms, dtype=np.float64)

    def _plan(self, grads: Sequence[Tensor | None]) -> None:
        shapes: dict[torch.Size, list[int]] = {}
        self._buckets, self._singles = [], []
        for index, grad in enumerate(grads):
            if grad is not None and _stackable(grad):
                shapes.setdefault(grad.shape, []).append(index)
            else:
                self._singles.append(index)
        for shape, members in shapes.items():
            if len(members) < BUCKET:
                self._singles += members
                continue
            stacked = torch.empty((len(members), *shape))
            rows = stacked.view(len(members), -1)
            self._buckets.append(
                _Bucket(np.array(members, np.intp), operator.itemgetter(*members), stacked, rows)
            )
        self._planned = len(grads)


def _stackable(grad: Tensor) -> bool:
    plain = grad.layout is torch.strided and grad.dtype is torch.float32 and type(grad) is Tensor
    return plain and 0 < grad.numel() <= SMALL and grad.device.type == "cpu"


def _single(grad: Tensor) -> float:
    """`sum_of_squares` with the common case (contiguous float32) kept to a few calls."""
    plain = grad.layout is torch.strided and grad.dtype is torch.float32 and not grad.requires_grad
    # BLAS sums a strided vector one by one, which loses three digits: contiguous only.
    if plain and type(grad) is Tensor and grad.is_contiguous():
        return _blocks(grad.view(-1))
    return sum_of_squares(grad)


@dataclass(frozen=True, slots=True)
class Detail:
    """The second look at one suspicious gradient; counts are elements, `norm` the true L2 norm (float64)."""

    norm: float
    nan: int
    inf: int

    @property
    def nonfinite(self) -> int:
        return self.nan + self.inf

    @property
    def overflow(self) -> bool:
        """Every element is finite and yet the norm exceeds float32."""
        return not self.nonfinite and self.norm > FLOAT32_MAX


def suspicious(squares: Squares, floor: NDArray[np.float64]) -> NDArray[np.intp]:
    """Positions where the fast sum cannot be trusted: non-finite, or so small that squares were flushed.

    `floor` is numel * UNDERFLOW of every tensor.
    """
    # Negated, so that NaN counts as untrusted; two reductions while all is well.
    if np.logical_and.reduce(squares >= floor) and np.add.reduce(squares) < np.inf:
        return _NOWHERE
    return np.flatnonzero(~((squares >= floor) & (squares < np.inf)))


_NOWHERE: NDArray[np.intp] = np.zeros(0, np.intp)


def inspect(grad: Tensor) -> Detail:
    """Count NaN and Inf elements and take the norm in float64, scaled so that nothing over- or underflows."""
    vector = flat(dense(grad)).detach()
    vector = vector.float() if vector.dtype in REDUCED else vector
    if not vector.numel():
        return Detail(0.0, 0, 0)
    low, high = torch.aminmax(
        vector
    )  # NaN if any element is; one cheap pass settles the common all-zero case
    largest = max(float(high), -float(low))  # sync: only on suspicion
    if largest == 0.0:
        return Detail(0.0, 0, 0)
    values = vector.cpu().numpy()  # sync: only on suspicion
    if not math.isfinite(largest):
        nan = int(np.count_nonzero(np.isnan(values)))
        return Detail(math.nan if nan else math.inf, nan, int(np.count_nonzero(np.isinf(values))))
    total = 0.0
    for start in range(0, values.size, 1 << 20):
        chunk = values[start : start + (1 << 20)].astype(np.float64) / largest
        total += float(np.dot(chunk, chunk))
    return Detail(largest * math.sqrt(total), 0, 0)
