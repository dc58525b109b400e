"""Norms of CPU gradients from one read: the total at once, single norms on demand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.policies.norm import EPSILON
from gradwatch.reading.batched_norms import Detail, RowNorms, add_up, inspect, suspicious

CLOSE = 1.001
"""Ten times the error of the quick total: beyond that the exact total gives the same answer."""


class CpuNorms:
    """Norms of K gradients, free of the loss scale `scale` they were read with.

    `floor[K]` are the sums of squares below which digits may have been lost; `details` the second looks at
    such gradients, by position; `looked`: the norms are known, second looks included.
    """

    __slots__ = ("_floor", "_norms", "details", "looked", "rows", "scale")

    @classmethod
    def of(cls, norms: NDArray[np.float64], details: dict[int, Detail]) -> CpuNorms:
        """Norms that were read one by one."""
        reading = cls(RowNorms.of(np.square(norms)), np.zeros(len(norms)), 1.0)
        reading._norms, reading.details, reading.looked = norms, details, True
        return reading

    def __init__(self, rows: RowNorms, floor: NDArray[np.float64], scale: float) -> None:
        self.rows = rows
        self._floor = floor
        self.scale = scale
        self._norms: NDArray[np.float64] | None = None
        self.looked = False
        self.details: dict[int, Detail] = {}

    def divided(self, scale: float) -> CpuNorms:
        """The same reading without a factor that was in the gradients when they were read."""
        other = CpuNorms(self.rows, self._floor, self.scale * scale)
        other.details = self.details
        if self._norms is not None:
            other._norms, other.looked = _divided(self._norms, scale), self.looked
        return other

    def surely_within(self, max_norm: float) -> bool:
        """True if a clip of the total at `max_norm` is certain to change nothing; one operation, False if close."""
        total = self.rows.total() / (self.scale or math.nan)
        return (total + float(EPSILON)) * CLOSE <= max_norm

    def finite(self) -> bool:
        """True if every norm is; one operation."""
        if self._norms is not None:
            return bool(np.isfinite(self._norms).all())
        return self.rows.total() < math.inf

    def refine(self, grads: Sequence[Tensor | None]) -> None:
        """Look a second time, while the gradients are there, where the fast sum may have over- or underflowed."""
        squares = self.rows.squares()
        norms = np.sqrt(squares)
        for k in map(int, suspicious(squares, self._floor)):
            grad = grads[k]
            if grad is not None:
                self.details[k] = detail = inspect(grad)
                norms[k] = detail.norm
        self._norms, self.looked = _divided(norms, self.scale), True

    def ready(self) -> bool:
        """True: nothing has to arrive."""
        return True

    def norms(self) -> NDArray[np.float64]:
        """float64[K], 0 where there was no gradient; the same array every time."""
        if self._norms is None:
            self._norms = _divided(np.sqrt(self.rows.squares()), self.scale)
        return self._norms

    def norms_of(self, chosen: Sequence[int]) -> list[float]:
        """The norms of a few gradients, without taking those of the others first where that can be helped."""
        if self._norms is not None:
            return [float(self._norms[k]) for k in chosen]
        norms = self.rows.norms_of(chosen)
        return norms if self.scale == 1.0 else [norm / (self.scale or math.nan) for norm in norms]

    def completed(self, known: Mapping[int, float]) -> CpuNorms:
        """The same reading with norms that were taken elsewhere, and were None here."""
        return self.with_norms(known, self.details)

    def with_norms(self, changed: Mapping[int, float], details: dict[int, Detail] | None = None) -> CpuNorms:
        """The same reading but for a few norms, with these `details` (None = without any)."""
        other, norms = CpuNorms(self.rows, self._floor, self.scale), self.norms().copy()
        other._norms, other.looked = norms, True
        other.details = {} if details is None else details
        for k, norm in changed.items():
            norms[k] = norm
        return other


def add_up_all(readings: Sequence[CpuNorms]) -> None:
    """Take the sums that `norms` of each of these needs at once, as far as they were read alike."""
    add_up([reading.rows for reading in readings if not reading.looked])


def _divided(norms: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    if scale == 1.0:
        return norms
    with np.errstate(divide="ignore", invalid="ignore"):  # a collapsed scale may reach 0
        return norms / scale
