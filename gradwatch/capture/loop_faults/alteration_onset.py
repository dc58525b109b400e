"""Steps whose gradients something other than a clip of torch's has changed, after many that were let be.

A loop that divides by the number of micro-batches, or makes a manual clip, does so from the start. What begins later is
told by the one factor that all gradients have in common.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LET_BE = 20  # steps without a change, after which one is a beginning
ALIKE = 1e-3
"""Relative difference of factors that are one: more than rounding to half precision makes of a norm."""


class AlteredGradients:
    """Steps of one optimizer at which gradients were altered between backward and step."""

    __slots__ = ("_last", "begun")

    def __init__(self) -> None:
        self._last = 0  # the last step at which they were
        self.begun = False  # that has begun after steps at which they were not

    def resumed(self, step: int) -> None:
        """Steps before this one are not known."""
        self._last = step

    def altered(self, step: int) -> bool:
        """Note that gradients were altered at this step; True if that has begun after `LET_BE` steps or more."""
        if step - self._last > 1:
            self.begun = step - self._last > LET_BE
        self._last = step
        return self.begun


def common_factor(
    calls: NDArray[np.int32], coef: NDArray[np.float32], total: float, applied: float
) -> float | None:
    """The factor that all gradients which arrived were multiplied by; None where there is no one factor."""
    if not (total > 0 and applied > 0):
        return None
    factor = applied / total
    own = coef[: len(calls)][calls > 0]
    return factor if len(own) and bool((np.abs(own - factor) <= ALIKE * factor).all()) else None
