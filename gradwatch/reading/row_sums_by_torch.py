"""Sums of rows as norms: `vector_norm` over rows, which torch divides among its threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.row_sums import HERE, Order, RowBuffer, Shape


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
