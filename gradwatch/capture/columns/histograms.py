"""Histograms over 64 octaves of magnitude, of gradients and of activations: parameters and modules take turns.

An element's octave is the exponent in its bits, so that nothing is rounded: exponents are counted, on the CPU by
numpy, on a device by torch without waiting, and the octaves made of them on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading import chunked_statistics
from gradwatch.reading.async_copy import Number, host_value, is_ready, on_host
from gradwatch.reading.layouts import dense, flat
from gradwatch.reading.pinned_buffers import POOL, Sending
from gradwatch.records.histogram import Histogram, by_exponent
from gradwatch.records.snapshot import BoolArray

AT_ONCE = 1 << 22
"""Elements on a device whose exponents are counted together: the numbers made of them take up to 20 bytes each."""
Counts = tuple[NDArray[np.int64], int]
"""Elements by the field of their exponent, and how many of the first are exact zeros."""


class PendingHistograms:
    """Histograms of one step by the position of the parameter or module, possibly on their way from a device."""

    def __init__(self, scale: Number) -> None:
        self._scale = scale
        self._here: dict[int, Counts] = {}
        self._sent: dict[int, Sending] = {}

    def __contains__(self, position: int) -> bool:
        return position in self._here or position in self._sent

    def put(self, position: int, tensor: Tensor) -> None:
        """Count the elements of one tensor, in the place of those that were put there before."""
        if on_host(tensor):
            self._sent.pop(position, None)
            self._here[position] = chunked_statistics.exponents(tensor)
        else:
            self._here.pop(position, None)
            self._sent[position] = POOL.send(_exponents(flat(tensor)))

    def ready(self) -> bool:
        """True if `histograms()` would return at once."""
        return is_ready(self._scale) and all(sent.ready() for sent in self._sent.values())

    @property
    def of_octaves(self) -> bool:
        """True if the loss scale is a power of two: only such a scale moves octaves, all that is known, as a whole."""
        return math.frexp(host_value(self._scale))[0] == 0.5

    def histograms(self) -> dict[int, Histogram]:
        """The histograms, the loss scale divided out; none where it is no power of two."""
        if not self.of_octaves:
            return {}
        _, exponent = math.frexp(host_value(self._scale))
        counted = dict(self._here)
        for k, sent in self._sent.items():
            numbers = sent.numbers()
            counted[k] = numbers[:-1], int(numbers[-1])
        return {k: by_exponent(fields, zeros, exponent - 1) for k, (fields, zeros) in counted.items()}


class HistogramTurns:
    """Positions of K whose histograms are due: each of the `chosen` every `every` steps, at its own of `phases[K]`.

    One that has nothing to be read at its turn is due at each step until it has: of what comes and goes with a period
    there would be no histogram.
    """

    def __init__(self, every: int, phases: NDArray[np.intp], chosen: BoolArray) -> None:
        self._every = every
        self._at: dict[int, list[int]] = {}  # positions by residue
        for k in np.flatnonzero(chosen).tolist():  # sync: numpy
            self._at.setdefault(int(phases[k]), []).append(k)
        self._overdue: tuple[int, ...] = ()

    def due(self, step: int) -> tuple[int, ...]:
        """Positions to be read at this step."""
        in_turn = self._at.get(step % self._every, ())
        return tuple(sorted({*in_turn, *self._overdue})) if in_turn else self._overdue

    def missed(self, positions: tuple[int, ...]) -> None:
        """Note those of the positions that were due of which nothing could be read."""
        self._overdue = positions


class HistogramReader:
    """Reads histograms of the gradients of K parameters when `turns` says."""

    def __init__(self, turns: HistogramTurns) -> None:
        self._turns = turns

    def collect(
        self, step: int, grads: Callable[[], Sequence[Tensor | None]], scale: Number
    ) -> PendingHistograms | None:
        """The histograms due at this step; None where none is. `scale` is the loss scale still in `grads()`."""
        due = self._turns.due(step)
        if not due:
            return None
        gradients = grads()
        missed = tuple(k for k in due if gradients[k] is None)
        self._turns.missed(missed)
        if len(missed) == len(due):
            return None
        pending = PendingHistograms(scale)
        for k in due:
            grad = gradients[k]
            tensor = None if grad is None else dense(grad)
            if tensor is not None and tensor.numel():
                pending.put(k, tensor)
        return pending


def _exponents(vector: Tensor) -> Tensor:
    """int64[257 or 2049]: elements by the field of their exponent, then the number of exact zeros."""
    wide = vector.dtype is torch.float64
    mantissa, fields = (52, 2048) if wide else (23, 256)
    counts = torch.zeros(fields + 1, dtype=torch.int64, device=vector.device)
    for part in vector.split(AT_ONCE):
        bits = part.view(torch.int64) if wide else part.float().view(torch.int32)
        field = (bits >> mantissa).bitwise_and(fields - 1).long()
        counts.scatter_add_(0, field, torch.ones_like(field))  # not bincount, which waits for the largest
    counts[fields] = vector.numel() - torch.count_nonzero(vector)
    return counts
