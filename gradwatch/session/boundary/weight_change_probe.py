"""A comparison that shows whether weights have moved: of a few elements of a few parameters, then and now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PROBED = 8  # parameters compared, and elements of each
MOST = 1 << 22  # elements of a gradient of which the largest is looked for


class Probed(NamedTuple):
    """Values of the parameter at a position, and where they stand: `param.view(-1)[::every]`, or at `at`."""

    position: int
    every: int
    at: Tensor | None
    values: Tensor


def probe(params: Sequence[Tensor]) -> list[Probed]:
    """A few elements of a few parameters that have a gradient, and of each the one with the largest; never waits."""
    with_gradient = [k for k, param in enumerate(params) if param.grad is not None]
    found = []
    for k in with_gradient[:: max(1, len(with_gradient) // PROBED)]:
        found += probe_at(params, k)
    return found


def probe_at(params: Sequence[Tensor], k: int) -> list[Probed]:
    """The elements of the parameter at this position; none where it has no gradient."""
    param = params[k]
    if param.grad is None:
        return []
    flat = _flat(param)
    every, at = max(1, flat.numel() // PROBED), _largest(param)
    found = [Probed(k, every, None, flat[::every].clone())]
    if at is not None and flat.numel() > PROBED:
        found.append(Probed(k, every, at, flat.index_select(0, at)))
    return found


def other_than(then: Probed, params: Sequence[Tensor], nan_differs: bool) -> bool:
    """True if these elements have other values now."""
    flat = _flat(params[then.position])
    now = flat[:: then.every] if then.at is None else flat.index_select(0, then.at)
    if now.shape != then.values.shape or now.dtype != then.values.dtype:
        return True
    if torch.equal(now, then.values):
        return False
    return nan_differs or not torch.allclose(now, then.values, rtol=0.0, atol=0.0, equal_nan=True)


def _flat(param: Tensor) -> Tensor:
    flat = param.detach()
    return getattr(flat, "_local_tensor", flat).reshape(-1)


def _largest(param: Tensor) -> Tensor | None:
    """int64[1], where the gradient is largest, in the first `MOST` elements; of a sparse one in its first row.

    An embedding moves in the few rows that were used. None where that cannot be said.
    """
    grad = param.grad
    if grad is None or hasattr(grad, "_local_tensor") or not grad.numel():
        return None
    if grad.layout is torch.sparse_coo and grad.sparse_dim() == 1 and grad._nnz():
        return grad._indices()[0, :1] * (param.numel() // param.shape[0])
    if grad.layout is not torch.strided or grad.numel() != param.numel():
        return None
    return grad.reshape(-1)[:MOST].abs().argmax().reshape(1)
