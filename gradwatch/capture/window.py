"""Measurements at one step boundary, some of which may become known a few steps later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.capture.pruning import PrunedCount
from gradwatch.capture.versions import Reading
from gradwatch.reading.batched import Detail
from gradwatch.reading.cpu import CpuNorms
from gradwatch.reading.device import DeviceNorms, Number, host_value, is_ready
from gradwatch.records.snapshot import Sites

Norms = NDArray[np.float64]


@dataclass(slots=True, eq=False)  # not frozen: what was put off is settled in `resolve`
class Window:
    """Measurements at one step boundary; `resolve()` gives the gradient norms.

    `sites` and `step` say what it belongs to; `calls[K]` arrivals; `details` the second looks by position;
    `micro` backwards; `left` the loss scale still in the gradients at the boundary (fused optimizers). `deferrable`:
    nothing looked unusual, so `resolve` may wait a few steps. `pruned` is what a few hooks say where most are removed:
    by `resolve` at the latest, whether they counted right. `loss_scale` is
    that of the scaler these gradients went through (None = none), `skipped` whether it rejects the step: 1 or
    0, None without a scaler.
    `empty`: every micro-batch of it was dropped, so there is nothing to step by. `loss` is the sum of what its
    backwards started from, a loss scale still in it; None where that is not known. `applied_known` False: nothing is
    known of what came of the gradients, and `after` stands for nothing.
    """

    sites: Sites
    step: int
    raw: Reading
    after: Reading
    calls: NDArray[np.int32]
    micro: int
    provisional: bool
    left: Number = 1.0
    deferrable: bool = False
    pruned: PrunedCount | None = None
    loss_scale: Number | None = None
    skipped: Number | None = None
    empty: bool = False
    loss: float | Tensor | None = None
    applied_known: bool = True

    @property
    def details(self) -> Mapping[int, Detail]:
        """The second looks at gradients whose norm is not finite, or so small that squares were flushed."""
        return self.raw.details

    def ready(self) -> bool:
        """True if `resolve()` would return without waiting."""
        numbers = (self.left, self.loss_scale or 1.0, self.skipped or 0.0)
        return self.raw.ready() and self.after.ready() and all(map(is_ready, numbers))

    def total_applied(self) -> float:
        """Root sum of squares of what the optimizer gets, gradients that no backward renewed included."""
        norms = self.after.norms()
        return float(np.sqrt(np.dot(norms, norms)))

    def total(self) -> float:
        """The total norm before clipping, of every gradient there is."""
        raw = self.raw.norms()
        return float(np.sqrt(np.dot(raw, raw)))

    def resolve(self) -> tuple[Norms, Norms]:
        """float64[K] norms (before anybody's clipping, as the optimizer gets them), loss scale removed.

        Only then `provisional` is final, where the window was ordinary.
        """
        raw = self.raw.norms()
        if self.pruned is not None:
            self.pruned.recheck(self.raw)
            self.provisional = self.provisional or not self.pruned.right
        return raw, raw if self.after is self.raw else self.after.norms()


def is_ordinary(raw: Reading, after: Reading) -> bool:
    """True if the quick total was enough for these gradients, and shows that they are finite."""
    if not isinstance(raw, CpuNorms) or raw.looked:
        return False
    return after is raw or (isinstance(after, CpuNorms) and after.finite() and not after.details)


def without(reading: Reading, scale: Number) -> Reading:
    """A reading free of a factor that is in the gradients."""
    return reading.divided(scale) if isinstance(reading, DeviceNorms) else reading.divided(host_value(scale))
