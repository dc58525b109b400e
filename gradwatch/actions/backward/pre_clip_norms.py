"""The norms that hooks found before they multiplied, in place of those that the batched read finds after it.

Axes: K parameters of a capture.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.reading.async_copy import AsyncCopy
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.foreach_norms import DeviceNorms

Acted = float | Tensor
"""The norm a hook found before it multiplied; a 0-dim tensor on a device, loss scale included."""


def before_acting(window: WindowNorms, acted: dict[int, Acted]) -> CpuNorms | DeviceNorms:
    """The window's reading with the norms found before the hooks multiplied.

    Where several backwards were accumulated it is the larger of what the hooks saw and what they left.
    """
    raw = window.raw
    if isinstance(raw, DeviceNorms):
        return PreClipReading(raw, {k: torch.as_tensor(norm) for k, norm in acted.items()}, window.micro > 1)
    left = raw.norms()
    norms = {k: float(norm) for k, norm in acted.items()}
    if window.micro > 1:
        norms = {k: max(norm, float(left[k])) for k, norm in norms.items()}
    return raw.with_norms(norms, raw.details)


class PreClipReading(DeviceNorms):
    """Norms on their way from a device, some of which hooks found before they multiplied."""

    def __init__(self, after: DeviceNorms, before: dict[int, Tensor], larger: bool) -> None:
        self._after = after
        self._larger = larger
        by_device: dict[torch.device, list[int]] = {}
        for k, norm in before.items():
            by_device.setdefault(norm.device, []).append(k)
        self._order = np.array([k for group in by_device.values() for k in group], np.intp)
        stacks = [torch.stack([before[k] for k in group]) for group in by_device.values()]
        super().__init__(stacks, AsyncCopy(stacks, np.arange(len(self._order)), len(self._order)))

    def ready(self) -> bool:
        """True if `norms()` would return at once."""
        return super().ready() and self._after.ready()

    def norms(self) -> np.ndarray:
        """float64[K] norms without the loss scale, 0 where there was no gradient."""
        found, before = self._after.norms().copy(), super().norms()
        found[self._order] = np.maximum(found[self._order], before) if self._larger else before
        return found
