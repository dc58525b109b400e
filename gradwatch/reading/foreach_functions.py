"""Operations of torch on a list of tensors at once: one launch a device, and no Python for each tensor.

Bound by name, so that a call costs what torch's own costs. A single factor given as a tensor on the CPU multiplies as
`clip_grad_norm_` does, to the bit, in bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SMALL = 1 << 12
"""Elements up to which a tensor on the CPU is cheaper to read together with others than a chunk at a time."""

norms: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm
"""The norm of each tensor, 0-dim: `norms(tensors, 2, dtype=torch.float32)`."""
multiply: Callable[[Sequence[Tensor], float | Tensor | Sequence[float] | Sequence[Tensor]], None] = (
    torch._foreach_mul_  # type: ignore[assignment]
)
"""Multiply each tensor in place, by one factor or by its own."""
overwrite: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch._foreach_copy_  # type: ignore[assignment]
"""Write the values of the second tensors into the first ones."""


def is_small(tensor: Tensor) -> bool:
    """True for a CPU tensor whose numbers are to be taken together with those of others."""
    wide = tensor.dtype is torch.float32 or tensor.dtype is torch.float64
    return wide and tensor.numel() <= SMALL and tensor.device.type == "cpu"


def host_norms(tensors: Sequence[Tensor], order: float) -> list[float]:
    """The norms of CPU tensors of one dtype, summed in float64, which holds the square of every float32."""
    if not tensors:
        return []
    found: list[float] = torch.stack(norms(tensors, order, dtype=torch.float64)).tolist()  # sync: CPU tensors
    return found


def clamped(tensors: list[Tensor], bound: float) -> tuple[Tensor, ...]:
    """New tensors with every element in [-bound, bound]; NaN stays."""
    made = torch._foreach_clamp_min(tensors, -bound)
    torch._foreach_clamp_max_(made, bound)
    return tuple(made)


def differences(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """New tensors, each a tensor less the other of its position."""
    return tuple(torch._foreach_sub(list(tensors), list(others)))
