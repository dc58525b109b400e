"""The sums of one read: rows of matrices, in one buffer, by torch (`row_sums_by_torch`) or BLAS (`row_sums_by_blas`).

Neither adds up more than a row in float32.

Axes: R rows of all gradients of a read, in the order in which they are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.runtime.interruption import not_ours

ROW = 1 << 13
# Squares below 2^-126 may be flushed to zero: 1e-5 relative is only certain above this mean square.
UNDERFLOW = 2.0**-126 * 1e5
FEW_FOR_FSUM = 256  # rows added up faster as floats: without what numpy passes through in cold caches
UNEVEN = 4  # rows may be so many times shorter than ROW, to divide a tensor without a rest

# Not what `torch.set_default_dtype` and `set_default_device` say.
HERE: Any = {"dtype": torch.float32, "device": "cpu"}

Shape = tuple[int, int]
Order = tuple[int, ...] | None


class SingleTensor(NamedTuple):
    """One dense float32 gradient, read as a matrix of `shape` after `permute(order)` (None = contiguous)."""

    place: int
    shape: Shape
    order: Order


class RowBuffer(ABC):
    """Buffer for the rows of one read after another: `read` fills it from float32 gradients on the CPU."""

    __slots__ = ("_few", "_host", "_outs")
    _outs: list[Any]  # the parts, as `read` writes to them; each kind of buffer makes its own

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """`shapes` are (rows, columns) of each part."""
        self._host: NDArray[np.float32] = np.zeros(sum(rows for rows, _ in shapes), np.float32)
        self._few = len(self._host) <= FEW_FOR_FSUM

    @staticmethod
    @abstractmethod
    def matrix(grad: Tensor, shape: Shape, order: Order) -> Any:
        """The memory of a gradient as a matrix of `shape`, once its dimensions are in `order` (None = as they are).

        TypeError, ValueError or RuntimeError where there are other elements, they cannot be reached so, or are not
        float32.
        """

    @classmethod
    def matrices(
        cls, singles: Sequence[SingleTensor], grads: Sequence[Tensor | None]
    ) -> tuple[list[Any], list[int]]:
        """(the matrices of single gradients, places of those that are absent, or of another layout this time)."""
        matrices, missed = [], []
        for place, shape, order in singles:
            grad: Any = grads[place]
            try:
                matrices.append(cls.matrix(grad, shape, order))
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                if not_ours(error):
                    raise
                missed.append(place)
        return matrices, missed

    @abstractmethod
    def read(
        self, matrices: Sequence[Any], parts: Sequence[int] | None = None
    ) -> tuple[NDArray[np.float32], float, float]:
        """Take every row of each matrix into its part (`parts` None: into all of them, in order).

        Returns the rows, a copy: sums of squares or norms, as its kind has them. Further their root sum of squares,
        good to 1e-4, and the smallest sum of squares of a row, infinite without rows. To be called `silently`.

        All matrices are made before any is read: a large gradient drives everything else out of the caches, and what
        comes between it and the next then costs several times what it should.
        """

    @staticmethod
    @abstractmethod
    def content(matrix: Any) -> bytes:
        """The elements of a matrix."""

    @staticmethod
    @abstractmethod
    def squares(rows: NDArray[np.float32]) -> NDArray[Any]:
        """[R] sums of squares of rows, at least float32."""

    @staticmethod
    @abstractmethod
    def norm(row: float) -> float:
        """The norm of one row."""


def divided(numel: int) -> tuple[int, int] | None:
    """(rows, columns) of rows not longer than ROW and not much shorter; None when none divide `numel`."""
    fewest = -(-numel // ROW)
    most = min(fewest * UNEVEN, numel)
    return next(((rows, numel // rows) for rows in range(fewest, most + 1) if numel % rows == 0), None)
