"""The cosine of the angle between a gradient and the first moment of those before it, as the optimizer keeps it.

Near 1 the gradients go one way, near 0 they are mostly noise, below 0 the step overshoots. It takes no memory: of the
gradient of the step before itself, which most optimizers do not keep, there is no such column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwatch.reading import chunked_statistics
from gradwatch.reading.async_copy import on_host
from gradwatch.reading.foreach_norms import NO_FLOAT64
from gradwatch.reading.layouts import dense, flat

AT_ONCE = 1 << 22
"""Elements on a device that are made float64 at a time."""


def cosines(moments: Mapping[int, Tensor], gradients: Sequence[Tensor | None]) -> dict[int, float | Tensor]:
    """g · m / (‖g‖ ‖m‖) by position of `gradients[K]`, for those with a dense moment here and a dense gradient.

    Where one of the two is zero, or not finite, NaN, or none.
    """
    found: dict[int, float | Tensor] = {}
    for k, moment in moments.items():
        gradient = gradients[k]
        if gradient is None or gradient.layout is not torch.strided:
            continue
        values = dense(gradient)
        if values.shape == moment.shape and (cosine := _cosine(values, moment)) is not None:
            found[k] = cosine
    return found


def _cosine(gradient: Tensor, moment: Tensor) -> float | Tensor | None:
    if gradient.stride() != moment.stride():
        gradient, moment = gradient.contiguous(), moment.contiguous()
    if not on_host(gradient):
        return _on_device(flat(gradient), flat(moment))
    dot, square, other = chunked_statistics.products(gradient, moment)
    if square == 0 or other == 0:
        return None
    return dot / math.sqrt(square) / math.sqrt(other)


def _on_device(gradient: Tensor, moment: Tensor) -> Tensor:
    dtype = torch.float32 if gradient.device.type in NO_FLOAT64 else torch.float64
    totals = torch.zeros(3, dtype=dtype, device=gradient.device)
    for some, others in zip(gradient.split(AT_ONCE), moment.split(AT_ONCE), strict=True):
        wide, other = some.to(dtype), others.to(dtype)
        totals += torch.stack([torch.dot(wide, other), torch.dot(wide, wide), torch.dot(other, other)])
    return totals[0] / totals[1].sqrt() / totals[2].sqrt()
