"""Host buffers for numbers on their way from a device: pinned, used over and over, never waited for to get one.

Allocating pinned memory may make the driver wait for the device, so buffers are kept: a few per device, type
and size (rounded up to a power of two). A buffer is free again once its numbers were taken out; one that
no caller collects is dropped, and torch's allocator keeps its memory until the copy is through.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

KEPT = 8
"""Free buffers kept per device, type and size; more than the four windows that may be under way at once."""


class Buffer:
    """One host buffer and the event that says when the last copy into it is through (None = at once)."""

    def __init__(self, device: torch.device, dtype: torch.dtype, capacity: int) -> None:
        on_cuda = device.type == "cuda"
        self.host = torch.empty(capacity, dtype=dtype, device="cpu", pin_memory=on_cuda)
        self.event = torch.cuda.Event() if on_cuda else None


class PinnedPool:
    """Free buffers by (device, dtype, capacity). Deques, since autograd runs one thread per device."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, torch.dtype, int], deque[Buffer]] = {}

    def send(self, part: Tensor) -> Sending:
        """Start copying a 1-d tensor to the host; returns at once where the source is a CUDA device."""
        part = part.detach()
        capacity = 1 << max(4, (part.numel() - 1).bit_length())
        free = self._free.setdefault((part.device, part.dtype, capacity), deque(maxlen=KEPT))
        try:
            buffer = free.pop()
        except IndexError:
            buffer = Buffer(part.device, part.dtype, capacity)
        # Other accelerators than CUDA copy before this returns: right, but not free of waiting.
        buffer.host[: part.numel()].copy_(part, non_blocking=True)
        if buffer.event is not None:
            buffer.event.record(_current_stream(part.device.index))
        return Sending(buffer, part.numel(), free)


_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}


def _current_stream(index: int) -> torch.cuda.Stream:
    """Current stream, without the object of `torch.cuda.current_stream`, which takes longer than a launch."""
    key = index, int(torch._C._cuda_getCurrentRawStream(index))
    stream = _STREAMS.get(key)
    if stream is None:
        stream = _STREAMS[key] = torch.cuda.current_stream(index)
    return stream


class Sending:
    """Numbers under way to the host."""

    def __init__(self, buffer: Buffer, count: int, free: deque[Buffer]) -> None:
        self._buffer: Buffer | None = buffer
        self._count = count
        self._free = free
        self._taken: NDArray[Any] | None = None

    def ready(self) -> bool:
        """True if `numbers()` would return at once."""
        event = None if self._buffer is None else self._buffer.event
        return event is None or bool(event.query())

    def numbers(self) -> NDArray[Any]:
        """[count] numbers, waited for where they have not arrived; gives the buffer back."""
        buffer = self._buffer
        if buffer is not None:
            if buffer.event is not None:
                buffer.event.synchronize()
            arrived = buffer.host[: self._count]
            if arrived.dtype == torch.bfloat16:  # which numpy has not
                arrived = arrived.float()
            self._taken = arrived.numpy().copy()  # sync: after the event, on the host
            self._buffer = None
            self._free.append(buffer)
        assert self._taken is not None
        return self._taken


POOL = PinnedPool()
"""Shared by everything that reads off a device in this process."""
