"""What one step boundary found of one optimizer's gradients, possibly still on its way from a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.hooks.device import DeviceReading, Number, is_ready
from gradwatch.hooks.norms import Detail
from gradwatch.snapshot import Sites

Norms = NDArray[np.float64]


@dataclass(slots=True, eq=False)  # not frozen: that would cost microseconds, and nobody else sees one
class Window:
    """What one step boundary found; `resolve()` waits for an accelerator, all else is on the host.

    `sites` and `step` say what it belongs to; `calls[K]` arrivals; `details` the second looks by position;
    `micro` backwards; `trusted` that thinned marks told the truth; `scale` the loss scale that was still in
    the gradients when they were read, `left` the one still in them at the boundary (fused optimizers).
    `loss_scale` is that of the scaler these gradients went through (None = none), `skipped` whether it rejects
    the step: 1 or 0, None without a scaler.
    """

    sites: Sites
    step: int
    raw: Norms | DeviceReading
    after: Norms | DeviceReading
    calls: NDArray[np.int32]
    details: Mapping[int, Detail]
    micro: int
    provisional: bool
    trusted: bool
    scale: Number
    left: Number = 1.0
    loss_scale: Number | None = None
    skipped: Number | None = None

    def ready(self) -> bool:
        """Whether `resolve()` would return without waiting."""
        numbers = (self.scale, self.left, self.loss_scale or 1.0, self.skipped or 0.0)
        parts = (self.raw, self.after)
        return all(map(is_ready, numbers)) and all(
            not isinstance(part, DeviceReading) or part.ready() for part in parts
        )

    def resolve(self) -> tuple[Norms, Norms]:
        """float64[K] norms (before anybody's clipping, as the optimizer gets them), loss scale removed."""
        raw = self._host(self.raw)
        return raw, raw if self.after is self.raw else self._host(self.after)

    def total_applied(self) -> float:
        """Root sum of squares of what the optimizer gets, gradients that nobody renewed included."""
        norms = self._host(self.after)
        return float(np.sqrt(np.dot(norms, norms)))

    def _host(self, part: Norms | DeviceReading) -> Norms:
        return part.norms() if isinstance(part, DeviceReading) else part
