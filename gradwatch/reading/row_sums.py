"""The sums of one read: rows of matrices, in one buffer, by the fastest read of the machine as it is set up.

With several threads that is `vector_norm` over rows, which torch divides among them. With one, which is how torchrun
starts its ranks, it is BLAS's `dot` of each row (numpy's `vecdot`, one call a gradient): 64 MB in 0.9 of the time of
torch's norms (`python -m tests.benchmarks.reading`). Which of the two is decided by the number of threads and never
by a clock, so that two runs of a script read the same digits. Neither adds up more than a row in float32.

Axes: R rows of all gradients of a read, in the order in which they are read.
"""

from __future__ import annotations

import contextvars
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW = 1 << 13
# Squares below 2^-126 may be flushed to zero: 1e-5 relative is only certain above this mean square.
UNDERFLOW = 2.0**-126 * 1e5
UNEVEN = 4  # rows may be so many times shorter than ROW, to divide a tensor without a rest

# Not what `torch.set_default_dtype` and `set_default_device` say.
HERE: Any = {"dtype": torch.float32, "device": "cpu"}

Shape = tuple[int, int]
Order = tuple[int, ...] | None
_FLOAT32 = np.dtype(np.float32)
_vecdot: Any = getattr(np, "vecdot", None)  # numpy 2.0

# Sums beyond float32 are found out, and looked at twice: numpy's warning adds nothing. Since 2.0 it keeps that
# setting in a context variable, so a context made once does what `np.errstate` does, at a tenth of its cost.
_no_warnings = contextvars.Context()
if _vecdot is not None:
    _no_warnings.run(np.seterr, all="ignore")

Result = TypeVar("Result")


class RowBuffer(ABC):
    """Buffer for the rows of one read: `read` fills parts of it from float32 gradients on the CPU."""

    __slots__ = ("_host",)

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        """`shapes` are (rows, columns) of each part."""
        self._host: NDArray[np.float32] = np.zeros(sum(rows for rows, _ in shapes), np.float32)

    @staticmethod
    @abstractmethod
    def matrix(grad: Tensor, shape: Shape, order: Order) -> Any:
        """The memory of a gradient as a matrix of `shape`, once its dimensions are in `order` (None = as they are).

        TypeError, ValueError or RuntimeError where there are other elements, they cannot be reached so, or are not
        float32.
        """

    @abstractmethod
    def read(self, parts: Sequence[int], matrices: Sequence[Any]) -> float:
        """Take every row of each `matrix` into its part. The root sum of squares of all rows, good to 1e-4.

        All are made before any is read: a large gradient drives everything else out of the caches, and what comes
        between it and the next then costs several times what it should. To be called `silently`.
        """

    @abstractmethod
    def min_row(self) -> float:
        """The smallest sum of squares of a row; infinite without rows."""

    @abstractmethod
    def norms(self, rows: Sequence[int]) -> list[float]:
        """The norms of a few rows."""

    @abstractmethod
    def squares(self) -> NDArray[Any]:
        """[R] sums of squares, at least float32."""


class NormRows(RowBuffer):
    """Rows as norms, by torch, with all its threads."""

    __slots__ = ("_parts", "_rows", "_scalar")

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__(shapes)
        rows = torch.from_numpy(self._host)
        self._parts = rows.split([count for count, _ in shapes])
        self._rows, self._scalar = rows.unsqueeze(0), torch.zeros(1, **HERE)

    @staticmethod
    def matrix(grad: Tensor, shape: Shape, order: Order) -> Tensor:
        if grad.dtype is not torch.float32:  # complex numbers would be taken, and lose digits
            raise TypeError(f"not float32 but {grad.dtype}")
        return (grad if order is None else grad.permute(order)).view(shape)

    def read(self, parts: Sequence[int], matrices: Sequence[Tensor]) -> float:
        take = torch.linalg.vector_norm
        for rows, out in zip(matrices, map(self._parts.__getitem__, parts), strict=True):
            take(rows, 2, 1, out=out)
        # By the very operation whose code is in the caches by now.
        return float(take(self._rows, 2, 1, out=self._scalar))  # sync: CPU tensor

    def min_row(self) -> float:
        if not self._rows.numel():
            return math.inf
        torch.linalg.vector_norm(self._rows, -math.inf, 1, out=self._scalar)
        min_row = float(self._scalar)  # sync: CPU tensor
        return min_row * min_row

    def norms(self, rows: Sequence[int]) -> list[float]:
        return list(map(self._host.item, rows))  # sync: numpy

    def squares(self) -> NDArray[Any]:
        return np.square(self._host, dtype=np.float64)


class SquareRows(RowBuffer):
    """Rows as sums of squares, by BLAS, on this thread."""

    __slots__ = ("_chunks", "_ones", "_parts", "_sums", "_totals")

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__(shapes)
        # No longer than a row: numpy's BLAS shares longer ones out among threads of its own.
        ones = np.ones(ROW, np.float32)
        starts = range(0, len(self._host), ROW)
        self._chunks = [self._host[start : start + ROW] for start in starts]
        self._ones = [ones[: len(chunk)] for chunk in self._chunks]
        self._sums = np.zeros(len(starts), np.float32)
        self._totals = [self._sums[k, ...] for k in range(len(starts))]
        self._parts = np.split(self._host, np.cumsum([count for count, _ in shapes[:-1]], dtype=np.intp))

    @staticmethod
    def matrix(grad: Tensor, shape: Shape, order: Order) -> NDArray[np.float32]:
        # numpy takes shapes at a third of what torch's dispatcher asks in cold caches.
        values = (grad.detach() if grad.requires_grad else grad).numpy()  # sync: CPU tensor
        if order is not None:
            values = values.transpose(order)
        # What is otherwise would be converted or copied in silence.
        if values.dtype is not _FLOAT32 or not values.flags.c_contiguous:
            raise TypeError(f"not float32 without gaps but {values.dtype} with strides {values.strides}")
        return values.reshape(shape)

    def read(self, parts: Sequence[int], matrices: Sequence[NDArray[np.float32]]) -> float:
        # Without a line of Python in between, for the same reason. The total is taken by the same operation: what
        # numpy's reductions pass through costs ten times as much.
        outs = [*map(self._parts.__getitem__, parts), *self._totals]
        deque(map(_vecdot, [*matrices, *self._chunks], [*matrices, *self._ones], outs), maxlen=0)
        return math.sqrt(math.fsum(self._sums.tolist()))  # sync: numpy

    @classmethod
    def of(cls, vector: Tensor) -> float | None:
        """Sum of squares of one contiguous float32 vector; None where it cannot be divided into rows."""
        shape = divided(vector.numel())
        if shape is None:
            return None
        rows = vector.detach().view(shape).numpy()  # sync: CPU tensor
        squares = silently(_vecdot, rows, rows)
        with np.errstate(all="ignore"):
            return float(np.add.reduce(squares, axis=None, dtype=np.float64))

    def min_row(self) -> float:
        return self._host.item(self._host.argmin()) if len(self._host) else math.inf  # sync: numpy

    def norms(self, rows: Sequence[int]) -> list[float]:
        return list(map(math.sqrt, map(self._host.item, rows)))  # sync: numpy

    def squares(self) -> NDArray[Any]:
        return self._host


def norms_of_rows(grads: Sequence[Tensor | None]) -> list[float | None]:
    """Norms of dense float32 CPU gradients of no more than a row each, None of any other. To be called `silently`."""
    rows = [None if grad is None else row_of(grad) for grad in grads]
    dot = np.vdot if _vecdot is None else _vecdot  # what a read brings into the caches
    return [None if row is None else math.sqrt(dot(row, row)) for row in rows]


def row_of(grad: Tensor) -> NDArray[np.float32] | None:
    """The memory of a dense float32 CPU gradient of no more than a row; None of any other.

    What a gradient is, numpy tells at a third of what torch's dispatcher asks in cold caches.
    """
    try:
        values = (grad.detach() if grad.requires_grad else grad).numpy()  # sync: CPU tensor
    except (TypeError, RuntimeError):
        return None  # sparse, or of a dtype that numpy does not know
    if values.dtype is not _FLOAT32 or values.size > ROW:
        return None
    values = values.reshape(-1)
    # Not where it is expanded: BLAS does not take it, and other sums lose digits.
    return values if values.flags.c_contiguous else None


def silently(call: Callable[..., Result], *args: Any) -> Result:
    """The call, without a warning of numpy's about what it meets."""
    return _no_warnings.copy().run(call, *args)  # a copy: a context can be entered once at a time


def fastest() -> type[RowBuffer]:
    """The fastest reader with the threads that torch has now."""
    return NormRows if _vecdot is None or torch.get_num_threads() > 1 else SquareRows


def divided(numel: int) -> tuple[int, int] | None:
    """(rows, columns) of rows not longer than ROW and not much shorter; None when none divide `numel`."""
    fewest = -(-numel // ROW)
    most = min(fewest * UNEVEN, numel)
    return next(((rows, numel // rows) for rows in range(fewest, most + 1) if numel % rows == 0), None)
