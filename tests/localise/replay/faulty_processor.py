"""A processor that computes one result wrongly, once: nothing that a model's file reaches knows of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Rows = int | slice


def _made() -> tuple[type[torch.autograd.Function], list[int]]:
    armed = [0]

    class Relu(torch.autograd.Function):
        """relu, and `value` in some rows when it is armed."""

        @staticmethod
        def forward(ctx: Any, h: Tensor, rows: Rows, value: float) -> Tensor:
            """Computed wrongly once."""
            out = h.clamp(min=0)
            ctx.save_for_backward(h)
            if armed[0]:
                armed[0] = 0
                out[rows] = value
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
            """Computed rightly."""
            (h,) = ctx.saved_tensors
            return grads[0] * (h > 0), None, None

    return Relu, armed


_relu, _armed = _made()


def relu(h: Tensor, rows: Rows = 4, value: float = torch.nan) -> Tensor:
    """relu, computed by a processor that may fail."""
    out: Tensor = _relu.apply(h, rows, value)
    return out


def arm() -> None:
    """The next result is wrong."""
    _armed[0] = 1


def disarm() -> None:
    """No result is wrong."""
    _armed[0] = 0


def once() -> bool:
    """True the first time after `arm`."""
    armed = bool(_armed[0])
    _armed[0] = 0
    return armed
