"""Clips that the script makes by `torch.nn.utils.clip_grad_*`: between backward and step, or where they do nothing."""

from __future__ import annotations

import math

from gradwatch.reading.async_copy import Number, on_host, one_number
from gradwatch.taps.clip_functions import Clip

COMPENSATED = 100.0
"""A bound above this may be meant for gradients that carry a loss scale (`max_norm * scaler.get_scale()`)."""

FOR_ITS_NORM = 1e6
"""A clip with a bound as large is there for the norm that it returns."""


class UserClips:
    """The clips of one optimizer's gradients since its last step.

    `used` of gradients that have arrived since, `idle` before any had (the last step's, zeros, or none at all);
    `ratio` the total norm ÷ `max_norm` of the only one that was used, `scale` the loss scale that it left in them.
    """

    __slots__ = ("_bound", "idle", "ratio", "scale", "used")

    def __init__(self) -> None:
        self.used = self.idle = 0
        self.ratio: Number | None = None
        self.scale: Number | None = None
        self._bound = math.inf

    def made(self, clip: Clip, arrived: bool) -> None:
        """A clip of the optimizer's gradients; `arrived`: a backward has brought some since the last step."""
        if not arrived:
            self.idle += clip.bound < FOR_ITS_NORM
            return
        self.used += 1
        self._bound, self.ratio = clip.bound, None
        if self.used == 1 and clip.total is not None and 0 < clip.bound < math.inf:
            if not on_host(clip.total):
                self.ratio = one_number(clip.total.detach(), clip.bound)
            elif math.isfinite(total := float(clip.total)):
                self.ratio = total / clip.bound

    def scale_removed(self, scale: Number) -> None:
        """Note that these gradients are divided by a loss scale after they were clipped."""
        if self._bound <= COMPENSATED:
            self.scale = scale
