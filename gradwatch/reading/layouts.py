"""Any gradient as flat dense numbers: sparse, complex, distributed, strided or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwatch.runtime.interruption import not_ours

REDUCED = (torch.float16, torch.bfloat16)


def dense(grad: Tensor) -> Tensor:
    """A plain real dense tensor with the L2 norm of this rank's part of `grad`; a view where possible."""
    if grad.requires_grad:
        grad = grad.detach()
    grad = local(grad)
    if grad.layout is torch.sparse_coo:
        # Duplicate indices add up, so the values alone would have the wrong norm.
        grad = grad.coalesce().values()
    elif grad.layout is not torch.strided:
        grad = grad.to_dense()
    if grad.is_neg():
        grad = grad.resolve_neg()  # numpy cannot read a tensor that is negated lazily
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def is_plain(grad: Tensor) -> bool:
    """True if `dense(grad)` is `grad` itself; asked first, since of almost all gradients it is."""
    return (
        type(grad) is Tensor
        and grad.layout is torch.strided
        and not (grad.requires_grad or grad.is_complex() or grad.is_neg())
    )


def elements(tensor: Tensor) -> Tensor:
    """A dense tensor of the elements; of a nested one those of all its components."""
    return dense(tensor.values() if tensor.is_nested else tensor)


def has_values(tensor: Tensor) -> bool:
    """False on the meta device, and of a stand-in that only traces shapes (FakeTensor), whose memory is there."""
    return tensor.untyped_storage().device.type != "meta"


def alias(grad: Tensor) -> Tensor | None:
    """`grad.detach()`, which may be kept: autograd can still steal the buffer of the original.

    None for the batched tensors of `autograd.grad(is_grads_batched=True)`, which allow no such thing and end
    in no `.grad`.
    """
    try:
        return grad.detach()
    except RuntimeError as error:
        if not_ours(error):
            raise
        return None


def local(grad: Tensor) -> Tensor:
    """This rank's shard of a DTensor, the tensor itself otherwise; torch.distributed is not imported for it."""
    to_local = getattr(grad, "to_local", None)
    if to_local is None:
        return grad
    shard: Tensor | None = getattr(grad, "_local_tensor", None)  # the same object every time, unlike a view
    return to_local() if shard is None else shard


def part(grad: Tensor, param: Any) -> Tensor:
    """This rank's part of a gradient, cut as the parameter is.

    Autograd leaves some DTensor gradients whole on every rank although the parameter is sharded (that of an
    embedding under `RowwiseParallel`); to cut those costs no communication.
    """
    if grad.layout is torch.strided and not alike(grad, param) and addable(grad, param):
        return local(grad.redistribute(placements=param.placements))  # type: ignore[attr-defined]
    return local(grad)


def parts(params: Sequence[Tensor]) -> list[Tensor | None]:
    """This rank's part of each gradient: a write in place to a DTensor bumps the version of that part only."""
    return [None if param.grad is None else part(param.grad, param) for param in params]


def unsummed(params: Sequence[Tensor]) -> list[int]:
    """Positions of the gradients that are not `addable`."""
    return [k for k, param in enumerate(params) if param.grad is not None and not addable(param.grad, param)]


def alike(grad: Any, param: Any) -> bool:
    """True if a gradient is laid out over the ranks as its parameter is."""
    return bool(getattr(grad, "placements", None) == getattr(param, "placements", None))


def addable(grad: Any, param: Any) -> bool:
    """True if the norm of the whole gradient follows from the norms of the ranks' parts.

    Not where it is still a sum not taken yet (`Partial`, as `SequenceParallel` leaves it), nor where it
    is sharded another way than the parameter.
    """
    if alike(grad, param):
        return True
    ours, its = getattr(grad, "placements", ()), getattr(param, "placements", ())
    if len(ours) != len(its):
        return False
    return all(one == other or one.is_replicate() for one, other in zip(ours, its, strict=True))


def flat(grad: Tensor) -> Tensor:
    """A dense gradient as one dimension, without copying where its memory has no gaps (channels_last too)."""
    if grad.is_contiguous():
        return grad.view(-1)
    order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    permuted = grad.permute(order)
    # `contiguous`, not `reshape`: a strided vector would stay one, and BLAS sums those one by one.
    return (permuted if permuted.is_contiguous() else grad.contiguous()).view(-1)
