"""Norms of CPU gradients from one read: the total at once, single norms on demand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.policies.norm import EPSILON
from gradwatch.reading.batched import Detail, RowNorms, inspect, suspicious

NEAR = 4.0
"""A total within this factor of the usual one (and so finite) lets the closer look wait a few steps."""

CLOSE = 1.001
"""Ten times the error of the quick total: beyond that the exact total gives the same answer."""


class CpuNorms:
    """Norms of K gradients, free of the loss scale `scale` they were read with.

    `floor[K]` are the sums of squares below which digits may have been lost; `details` the second looks at
    such gradients, by position.
    """

    __slots__ = ("_floor", "_norms", "_rows", "_scale", "details")

    @classmethod
    def of(cls, norms: NDArray[np.float64], details: dict[int, Detail]) -> CpuNorms:
        """Norms that were read one by one."""
        reading = cls(RowNorms.of(np.square(norms)), np.zeros(len(norms)), 1.0)
        reading._norms, reading.details = norms, details
        return reading

    def __init__(self, rows: RowNorms, floor: NDArray[np.float64], scale: float) -> None:
        self._rows = rows
        self._floor = floor
        self._scale = scale
        self._norms: NDArray[np.float64] | None = None
        self.details: dict[int, Detail] = {}

    @property
    def looked(self) -> bool:
        """True if the norms are known, second looks included."""
        return self._norms is not None

    def divided(self, scale: float) -> CpuNorms:
        """The same reading without a factor that was in the gradients when they were read."""
        other = CpuNorms(self._rows, self._floor, self._scale * scale)
        other.details = self.details
        if self._norms is not None:
            other._norms = _divided(self._norms, scale)
        return other

    def is_ordinary(self, usual: float, grads: Sequence[Tensor | None]) -> bool:
        """True if the quick total is enough: it is about `usual`, and no gradient is so small as to need an exact read.

        A gradient is gone by the time its norm is asked for, so what a second look is due for is found here.
        """
        middle = usual * (self._scale or math.nan)
        return self._rows.is_ordinary(middle / NEAR, middle * NEAR, grads, self._floor)

    def surely_within(self, max_norm: float) -> bool:
        """True if a clip of the total at `max_norm` is certain to change nothing; one operation, False if close."""
        total = self._rows.total() / (self._scale or math.nan)
        return (total + float(EPSILON)) * CLOSE <= max_norm

    def finite(self) -> bool:
        """True if every norm is; one operation."""
        if self._norms is not None:
            return bool(np.isfinite(self._norms).all())
        return self._rows.total() < math.inf

    def refine(self, grads: Sequence[Tensor | None]) -> None:
        """Look a second time at what the fast sum cannot be trusted with, while the gradients are at hand."""
        squares = self._rows.squares()
        norms = np.sqrt(squares)
        for k in map(int, suspicious(squares, self._floor)):
            grad = grads[k]
            if grad is not None:
                self.details[k] = detail = inspect(grad)
                norms[k] = detail.norm
        self._norms = _divided(norms, self._scale)

    def ready(self) -> bool:
        """Nothing has to arrive."""
        return True

    def norms(self) -> NDArray[np.float64]:
        """float64[K], 0 where there was no gradient."""
        if self._norms is None:
            norms = np.sqrt(self._rows.squares())
            return norms if self._scale == 1.0 else _divided(norms, self._scale)
        return self._norms

    def norms_of(self, chosen: Sequence[int]) -> list[float]:
        """The norms of a few gradients, without taking those of the others first where that can be helped."""
        if self._norms is not None:
            return [float(self._norms[k]) for k in chosen]
        norms = self._rows.norms_of(chosen)
        return norms if self._scale == 1.0 else [norm / (self._scale or math.nan) for norm in norms]

    def completed(self, known: Mapping[int, float]) -> CpuNorms:
        """The same reading with norms that were taken elsewhere, and were None here."""
        whole = self.with_norms(known)
        whole.details = self.details
        return whole

    def with_norms(self, changed: Mapping[int, float]) -> CpuNorms:
        """The same reading but for a few norms."""
        other = CpuNorms(self._rows, self._floor, self._scale)
        other._norms = norms = self.norms().copy()
        for k, norm in changed.items():
            norms[k] = norm
        return other


def _divided(norms: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    if scale == 1.0:
        return norms
    with np.errstate(divide="ignore", invalid="ignore"):  # a collapsed scale may reach 0
        return norms / scale
