"""Writes that move no version: a few small gradients are measured again at the step boundary.

`p.grad.data.clamp_()`, `p.grad.data /= n` and numpy write to a gradient without raising its version, so that
signatures call it untouched. Reading everything twice would cost a step's whole read again; a few small gradients
cost microseconds, and code that writes to gradients rarely spares all of them. What changes only others, or
leaves these norms as they were (a change of signs), stays unseen.

Axes: K parameters of a lane.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.hooks.host import HostReading
from gradwatch.hooks.norms import sum_of_squares
from gradwatch.hooks.rows import UNDERFLOW, dot, row_of, silently

MOST = 3
SMALL = 4096
"""Elements of a gradient that costs next to nothing to measure again."""
RELATIVE = 1e-5
"""What two reads of the same gradient may differ by: the accuracy of the batched read."""

Held = tuple[int, NDArray[np.float32]]
"""Where the memory of a gradient begins, and that memory."""


class Sentinels:
    """A few small gradients of one lane, chosen once: from each part of it the largest by norm, which a
    clamp is most likely to reach. `numels[K]` are the sizes of the parameters.
    """

    def __init__(self, numels: NDArray[np.int64]) -> None:
        self._floor = np.sqrt(numels * UNDERFLOW)
        self._numels = numels
        self._chosen: list[int] = []
        self._floors: list[float] = []  # of those chosen: as floats, which compare without numpy
        self._held: Sequence[Held | None] = ()  # of those chosen

    def hold(self, grads: Sequence[Tensor | None]) -> None:
        """Make ready in warm caches, before a read, what `agree` looks at; after it that costs ten times as much."""
        self._held = [None if (grad := grads[k]) is None else _held(grad) for k in self._chosen]

    def let_go(self) -> None:
        """Nobody will be asked about what is held."""
        self._held = ()

    def agree(
        self, grads: Sequence[Tensor | None], read: HostReading, factor: float, but: Container[int] = ()
    ) -> bool:
        """Whether these gradients, `but` for some, have the norms that were read of them, times `factor`."""
        told = False
        chosen = self._chosen or self._choose(read.norms())
        held, self._held = self._held or [None] * len(chosen), ()
        now = silently(_norms, grads, chosen, held)
        for k, norm, floor, found in zip(chosen, read.norms_of(chosen), self._floors, now, strict=True):
            grad, expected = grads[k], norm * factor
            if grad is None or expected < floor:
                continue  # says nothing: zero stays zero whatever it is multiplied by
            told = True
            if k in but:
                continue
            if found is None:
                found = math.sqrt(sum_of_squares(grad))
            # Not a call for the ordinary case; NaN compares as false, and everything is close to infinity.
            close = abs(found - expected) <= RELATIVE * expected < math.inf
            if not close and (math.isfinite(expected) or math.isfinite(found)):
                return False
        if not told:
            self._chosen = []
        return True

    def _choose(self, norms: NDArray[np.float64]) -> list[int]:
        telling = np.flatnonzero(norms > self._floor)
        small = telling[self._numels[telling] <= SMALL]
        if not len(small):
            small = telling[np.argsort(self._numels[telling], kind="stable")[:1]]
        parts = [part for part in np.array_split(small, MOST) if len(part)]
        self._chosen = [int(part[np.argmax(norms[part])]) for part in parts]
        self._floors = [float(self._floor[k]) for k in self._chosen]
        self._held = ()
        return self._chosen


def _held(grad: Tensor) -> Held | None:
    row = row_of(grad)
    return None if row is None else (grad.data_ptr(), row)


def _norms(
    grads: Sequence[Tensor | None], chosen: list[int], held: Sequence[Held | None]
) -> list[float | None]:
    """The norms of those chosen, None where BLAS cannot tell; `held` is what was made ready of them."""
    found: list[float | None] = []
    for k, ready in zip(chosen, held, strict=True):
        row, grad = None, grads[k]
        if grad is not None:
            # Other memory may have been put under the same gradient (`.data =`), and what is held may be gone then.
            row = ready[1] if ready is not None and ready[0] == grad.data_ptr() else row_of(grad)
        found.append(None if row is None else math.sqrt(dot(row, row)))
    return found
