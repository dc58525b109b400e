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

    __slots__ = ("_rows", "_scalar")

    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__(shapes)
        rows = torch.from_numpy(self._host)
        self._outs = list(rows.split([count for count, _ in shapes]))
        self._rows, self._scalar = rows.unsqueeze(0), torch.zeros(1, **HERE)

    @staticmethod
    def matrix(grad: Tensor, shape: Shape, order: Order) -> Tensor:
        if grad.dtype is not torch.float32:  # complex numbers would be taken, and lose digits
            raise TypeError(f"not float32 but {grad.dtype}")
        return (grad if order is None else grad.permute(order)).view(shape)

    def read(
        self, matrices: Sequence[Tensor], parts: Sequence[int] | None = None
    ) -> tuple[NDArray[np.float32], float, float]:
        take = torch.linalg.vector_norm
        outs = self._outs if parts is None else map(self._outs.__getitem__, parts)
        for rows, out in zip(matrices, outs, strict=True):
            take(rows, 2, 1, out=out)
        if self._few:
            norms = self._host.tolist()  # sync: numpy
            total, least = math.hypot(*norms), min(norms, default=math.inf)
        else:  # by the very operation whose code is in the caches by now
            total = float(take(self._rows, 2, 1, out=self._scalar))  # sync: CPU tensor
            least = float(take(self._rows, -math.inf, 1, out=self._scalar))  # sync: CPU tensor
        return self._host.copy(), total, least * least

    @staticmethod
    def content(matrix: Tensor) -> bytes:
        return matrix.resolve_neg().numpy().tobytes()  # sync: CPU tensor

    @staticmethod
    def squares(rows: NDArray[np.float32]) -> NDArray[Any]:
        return np.square(rows, dtype=np.float64)

    @staticmethod
    def norm(row: float) -> float:
        return row
