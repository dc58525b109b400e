"""Numbers of several columns that travel from a device to the host in one copy.

A copy costs the host as much as some launches: a buffer, the copy and an event. So what is read of a step here and
there is collected first, as 0-dim tensors, and leaves together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwatch.reading.async_copy import AsyncCopy, Floats
from gradwatch.reading.foreach_norms import widest


class Place(NamedTuple):
    """Position of the numbers of one call of `add`: from `start` to `stop` among those of their device and dtype."""

    device: torch.device
    dtype: torch.dtype
    start: int
    stop: int


class JointCopy:
    """0-dim tensors of devices, which leave in one copy from each device: `add` some times, then `leave` once.

    Where `leave` is not called, asking for a number does it.
    """

    __slots__ = ("_arrived", "_copies", "_starts", "_tensors")

    def __init__(self) -> None:
        self._tensors: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
        self._copies: dict[torch.device, AsyncCopy] = {}
        self._starts: dict[tuple[torch.device, torch.dtype], int] = {}
        self._arrived: dict[torch.device, Floats] = {}

    def add(self, numbers: Sequence[Tensor]) -> Place:
        """Take 0-dim tensors of one device and dtype, at least one."""
        device, dtype = numbers[0].device, numbers[0].dtype
        others = self._tensors.setdefault(device, {}).setdefault(dtype, [])
        others.extend(numbers)
        return Place(device, dtype, len(others) - len(numbers), len(others))

    def leave(self) -> None:
        """Start the copies; nothing can be added any more."""
        for device, by_dtype in self._tensors.items():
            stacks, count = [], 0
            for dtype, tensors in by_dtype.items():
                stacks.append(torch.stack(tensors))
                self._starts[device, dtype] = count
                count += len(tensors)
            if len(stacks) > 1:  # counts are exact in float64 up to 2^53
                stacks = [torch.cat([stack.to(widest(device)) for stack in stacks])]
            self._copies[device] = AsyncCopy(stacks, np.arange(count), count)
        self._tensors = {}

    def _left(self, device: torch.device) -> AsyncCopy:
        if self._tensors:
            self.leave()
        return self._copies[device]

    def ready(self, place: Place) -> bool:
        """True if `numbers` would return at once."""
        return self._left(place.device).ready()

    def numbers(self, place: Place) -> Floats:
        """The numbers of one `add`, waited for where they have not arrived: float32 if they were, else float64."""
        copy = self._left(place.device)
        if place.device not in self._arrived:
            self._arrived[place.device] = copy.values()
        first = self._starts[place.device, place.dtype]
        found = self._arrived[place.device][first + place.start : first + place.stop]
        return found.astype(np.float32) if place.dtype is torch.float32 else found.astype(np.float64)
