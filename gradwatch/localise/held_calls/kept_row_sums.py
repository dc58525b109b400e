"""Sums of the rows of a large tensor, kept in its place: they take a hundredth of its memory, or less.

A row is a stretch of its memory, whatever its dimensions.

The sum of the bits of a row, taken as whole numbers, is exact: it is the same in whatever order a device adds, and
another one where any bit is. The sum of the numbers says by how much a row is another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_ROWS = 1024
WORD = 8  # bytes of the whole numbers that are added
KINDS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
LEAST = 1 << 10  # bytes of a row: below, its sums would take a part of its memory that counts


class RowSums(NamedTuple):
    """The sums of each row: of its `bits`, and of its numbers (`values`); `order` are its dimensions as they lie."""

    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]
    bits: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return int(self.bits.nbytes + self.values.nbytes)


def row_sums(tensor: Tensor) -> RowSums | None:
    """The sums of a dense tensor; None of one that has gaps, or that cannot be divided into rows of whole words."""
    order = tuple(range(tensor.dim()))
    laid_out = tensor.detach()
    if not laid_out.is_contiguous():
        strides = tensor.stride()
        order = tuple(sorted(order, key=lambda n: -strides[n]))
        laid_out = laid_out.permute(order)
    rows = _rows_in(tensor)
    if not rows or not laid_out.is_contiguous() or tensor.dtype not in KINDS:
        return None
    numbers = laid_out.view(rows, -1)
    bits = numbers.view(torch.int64).sum(1)
    return RowSums(tensor.shape, tensor.dtype, order, bits, numbers.sum(1))


def rows_of(tensor: Tensor, sums: RowSums) -> Tensor:
    """The numbers of a tensor of which these are the sums, row by row."""
    return tensor.detach().permute(sums.order).reshape(sums.bits.numel(), -1)


def _rows_in(tensor: Tensor) -> int:
    """Count of the rows that it is divided into: as many as there may be of equal length; 0 where there are none."""
    count, per_word = tensor.numel(), WORD // tensor.element_size()
    if not count or count % per_word or tensor.storage_offset() % per_word:
        return 0
    words = count // per_word
    least = max(1, -(-words // MOST_ROWS), LEAST // WORD)  # words of a row
    return next((words // size for size in range(least, 2 * least + 1) if words % size == 0), 1)
