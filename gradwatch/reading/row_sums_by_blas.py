"""Sums of squares of rows by BLAS's `dot`, on one thread: numpy's `vecdot`, one call a gradient.

64 MB take 0.9 of the time of torch's norms (`python -m tests.benchmarks.reading`).
"""

from __future__ import annotations

import contextvars
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.row_sums import ROW, Order, RowBuffer, Shape, SingleTensor, divided
from gradwatch.runtime.interruption import not_ours

_FLOAT32 = np.dtype(np.float32)
vecdot: Any = getattr(np, "vecdot", None)  # numpy 2.0

# Sums beyond float32 are found out, and looked at twice: numpy's warning adds nothing. Since 2.0 it keeps that
# setting in a context variable, so a context made once does what `np.errstate` does, at a tenth of its cost.
NO_WARNINGS = contextvars.Context()
if vecdot is not None:
    NO_WARNINGS.run(np.seterr, all="ignore")

Result = TypeVar("Result")


class SquareRows(RowBuffer):
    """Rows as sums of squares, by BLAS, on this thread."""

    __slots__ = ("_chunks", "_ones", "_sums", "_totals")

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__(shapes)
        # No longer than a row: numpy's BLAS shares longer ones out among threads of its own.
        ones = np.ones(ROW, np.float32)
        starts = range(0, len(self._host), ROW)
        self._chunks = [self._host[start : start + ROW] for start in starts]
        self._ones = [ones[: len(chunk)] for chunk in self._chunks]
        self._sums = np.zeros(len(starts), np.float32)
        self._totals = [self._sums[k, ...] for k in range(len(starts))]
        self._outs = np.split(self._host, np.cumsum([count for count, _ in shapes[:-1]], dtype=np.intp))

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

    @classmethod
    def matrices(
        cls, singles: Sequence[SingleTensor], grads: Sequence[Tensor | None]
    ) -> tuple[list[Any], list[int]]:
        made, missed = [], []
        for place, shape, order in singles:
            grad: Any = grads[place]
            try:
                values = (grad.detach() if grad.requires_grad else grad).numpy()  # sync: CPU tensor
                # Without the frame of `matrix` for what is as almost every gradient.
                plain = order is None and values.dtype is _FLOAT32 and values.flags.c_contiguous
                made.append(values.reshape(shape) if plain else cls.matrix(grad, shape, order))
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                if not_ours(error):
                    raise
                missed.append(place)
        return made, missed

    def read(
        self, matrices: Sequence[NDArray[np.float32]], parts: Sequence[int] | None = None
    ) -> tuple[NDArray[np.float32], float, float]:
        outs = self._outs if parts is None else [*map(self._outs.__getitem__, parts)]
        if self._few:
            # Without a line of Python in between, for the same reason.
            deque(map(vecdot, matrices, matrices, outs), maxlen=0)
            squares = self._host.tolist()  # sync: numpy
            return self._host.copy(), math.sqrt(math.fsum(squares)), min(squares, default=math.inf)
        # The total is taken by the same operation: what numpy's reductions pass through costs ten times as much.
        outs = [*outs, *self._totals]
        deque(map(vecdot, [*matrices, *self._chunks], [*matrices, *self._ones], outs), maxlen=0)
        total = math.sqrt(math.fsum(self._sums.tolist()))  # sync: numpy
        return self._host.copy(), total, float(self._host.min())  # sync: numpy

    @classmethod
    def of(cls, vector: Tensor) -> float | None:
        """Sum of squares of one contiguous float32 vector; None where it cannot be divided into rows."""
        shape = divided(vector.numel())
        if shape is None:
            return None
        rows = vector.detach().view(shape).numpy()  # sync: CPU tensor
        squares = silently(vecdot, rows, rows)
        with np.errstate(all="ignore"):
            return float(np.add.reduce(squares, axis=None, dtype=np.float64))

    @staticmethod
    def content(matrix: NDArray[np.float32]) -> bytes:
        return matrix.tobytes()

    @staticmethod
    def squares(rows: NDArray[np.float32]) -> NDArray[Any]:
        return rows

    @staticmethod
    def norm(row: float) -> float:
        return math.sqrt(row)


def norms_of_rows(grads: Sequence[Tensor | None]) -> list[float | None]:
    """Norms of dense float32 CPU gradients of no more than a row each, None of any other. To be called `silently`."""
    rows = [None if grad is None else row_of(grad) for grad in grads]
    dot = np.vdot if vecdot is None else vecdot  # what a read brings into the caches
    return [None if row is None else math.sqrt(dot(row, row)) for row in rows]


def row_of(grad: Tensor) -> NDArray[np.float32] | None:
    """The memory of a dense float32 CPU gradient of no more than a row; None of any other.

    numpy knows what a gradient is at a third of what torch's dispatcher asks in cold caches.
    """
    try:
        values = (grad.detach() if grad.requires_grad else grad).numpy()  # sync: CPU tensor
    except (TypeError, RuntimeError) as error:
        if not_ours(error):
            raise
        return None  # sparse, or of a dtype that numpy does not know
    if values.dtype is not _FLOAT32 or values.size > ROW:
        return None
    values = values.reshape(-1)
    # Not where it is expanded: BLAS does not take it, and other sums lose digits.
    return values if values.flags.c_contiguous else None


def silently(call: Callable[..., Result], *args: Any) -> Result:
    """The call, without a warning of numpy's about what it meets."""
    return NO_WARNINGS.copy().run(call, *args)  # a copy: a context can be entered once at a time
