"""Rows of a gradient and their norms, for the policies that treat elements or rows apart.

`gradwatch.actions.elementwise_clip` says what happens where several policies cover one parameter. torch is imported
when a gradient is there: rule files are read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MARGIN = 1.0 + 1e-5
"""More than a norm as it was read can be too small by."""


def row_norms(tensor: Tensor) -> Tensor:
    """The L2 norm of what each index of the first dimension selects, broadcastable; of all for a vector or scalar."""
    import torch

    dims = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else None
    norms: Tensor = torch.linalg.vector_norm(
        tensor, dim=dims, keepdim=dims is not None, dtype=accumulator(tensor)
    )
    return norms


def accumulator(tensor: Tensor) -> torch.dtype | None:
    """The dtype to add up in: float32 for half precision, else the tensor's own."""
    import torch

    return torch.float32 if tensor.dtype.itemsize < torch.float32.itemsize else None
