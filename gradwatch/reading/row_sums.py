"""The sums of one read: rows of matrices, in one buffer, by torch (`row_sums_by_torch`) or BLAS (`row_sums_by_blas`).

Neither adds up more than a row in float32.

Axes: R rows of all gradients of a read, in the order in which they are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

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


def divided(numel: int) -> tuple[int, int] | None:
    """(rows, columns) of rows not longer than ROW and not much shorter; None when none divide `numel`."""
    fewest = -(-numel // ROW)
    most = min(fewest * UNEVEN, numel)
    return next(((rows, numel // rows) for rows in range(fewest, most + 1) if numel % rows == 0), None)
