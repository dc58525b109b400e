"""Numbers copied from an accelerator to pinned memory of the host, without making the host wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.pinned_buffers import POOL

Floats: TypeAlias = NDArray[np.float32] | NDArray[np.float64]


class AsyncCopy:
    """Per-position numbers on their way to the host, from one or several devices.

    `parts` are 1-d tensors whose concatenation belongs to `positions` of an array of `count`; `factor[count]`
    multiplies the result and `scale` divides it, on the host: a factor sent to the device would make it wait.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        positions: NDArray[np.intp],
        count: int,
        factor: NDArray[np.float32] | None = None,
        scale: Number = 1.0,
    ) -> None:
        self.positions = positions
        self._count = count
        self._factor = factor
        self._scale = scale
        self._sent = [POOL.send(part) for part in parts]

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        return all(part.ready() for part in self._sent) and is_ready(self._scale)

    def values(self) -> Floats:
        """[count] numbers, 0 where nothing was sent, float64 if any part is; waits for what has not arrived."""
        arrived_parts: list[Floats] = [part.numbers() for part in self._sent]
        wide = any(part.dtype.itemsize > 4 for part in arrived_parts)  # counts, too
        out: NDArray[Any] = np.zeros(self._count, np.float64 if wide else np.float32)
        if arrived_parts:
            out[self.positions] = np.concatenate(arrived_parts)
        if self._factor is not None:
            out *= self._factor
        scale = host_value(self._scale)
        if scale != 1.0:
            with np.errstate(divide="ignore", invalid="ignore"):
                out /= scale
        return out


class CopiedNumber(AsyncCopy):
    """One number of a copy that is under way, divided on the host by `scale`."""

    def __init__(self, whole: AsyncCopy, index: int, scale: Number = 1.0) -> None:
        self._whole, self._index, self._divisor = whole, index, scale

    def divided(self, scale: Number) -> CopiedNumber:
        """The same number, divided by `scale`."""
        return CopiedNumber(self._whole, self._index, scale)

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        return self._whole.ready() and is_ready(self._divisor)

    def values(self) -> Floats:
        """[1] number; waits for it where it has not arrived."""
        one, scale = self._whole.values()[self._index :][:1], host_value(self._divisor)
        with np.errstate(divide="ignore", invalid="ignore"):  # a collapsed scale may reach 0
            return one if scale == 1.0 else one / scale


Number: TypeAlias = float | AsyncCopy
"""One number: known, or on its way from a device."""

_FIRST = np.zeros(1, np.intp)


def on_host(tensor: Tensor) -> bool:
    """True if the numbers of a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def start_copy(value: float | Tensor) -> Number:
    """A number as it is; a one-element tensor read without waiting, where it lives on a device."""
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach()
    return float(value) if on_host(value) else AsyncCopy([value.reshape(1)], _FIRST, 1)


def one_number(value: Tensor, scale: Number = 1.0) -> AsyncCopy:
    """A one-element tensor on its way to the host, divided there by `scale`."""
    return AsyncCopy([value.reshape(1)], _FIRST, 1, scale=scale)


def host_value(value: Number) -> float:
    """The number behind `start_copy`, waited for where it is still on its way."""
    return float(value.values()[0]) if isinstance(value, AsyncCopy) else float(value)


def is_ready(value: Number) -> bool:
    """True if `host_value` would return at once."""
    return not isinstance(value, AsyncCopy) or value.ready()


def capturing() -> bool:
    """True if a CUDA graph is being captured on this thread's stream: then gradwatch may enqueue nothing."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
