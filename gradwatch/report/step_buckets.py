"""Downsampling that loses no spike: of each bucket of steps the smallest and the largest value, and what is not finite.

Buckets are made while steps come in, in bounded memory: as narrow as their number allows, and joined two by two where
that does not suffice. Axes: B buckets, C columns, n steps of one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Bucketed(Protocol):
    """Something that is kept per bucket of a `StepAxis`."""

    def regroup(self, slots: NDArray[np.int64]) -> None:
        """Move what is in bucket i to bucket `slots[i]`, joined with what goes there too."""


class StepAxis:
    """At most `most` buckets of `width` steps each; bucket i begins at step `(first + i) * width`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.width = 1
        self.count = 0
        self._first = 0
        self._kept: list[Bucketed] = []

    def keep(self, bucketed: Bucketed) -> None:
        """Have this regrouped whenever the buckets change."""
        self._kept.append(bucketed)

    @property
    def starts(self) -> list[int]:
        """The first step of each bucket."""
        return [(self._first + at) * self.width for at in range(self.count)]

    def slots(self, steps: Sequence[int]) -> NDArray[np.int64]:
        """The bucket of each step, after the buckets were made wide enough to hold all of them."""
        low, high = min(steps), max(steps)
        if self.count:
            low = min(low, self._first * self.width)
            high = max(high, (self._first + self.count) * self.width - 1)
        width = self.width
        while high // width - low // width >= self.most:
            width *= 2
        self._move(width, low // width)
        self.count = high // width - low // width + 1
        return np.array([step // width - self._first for step in steps], np.int64)

    def _move(self, width: int, first: int) -> None:
        if self.count and (width, first) != (self.width, self._first):
            slots = np.array([start // width - first for start in self.starts], np.int64)
            for each in self._kept:
                each.regroup(slots)
        self.width, self._first = width, first


class Envelope:
    """The smallest and largest finite value of C columns per bucket, and `bad[B, C]`: some value was NaN or Inf.

    Without any value `low` is Inf and `high` -Inf.
    """

    def __init__(self, axis: StepAxis, columns: int, dtype: type[np.floating[Any]] = np.float64) -> None:
        self._dtype = dtype
        self._most = axis.most
        self.low, self.high, self.bad = self._empty(columns)
        axis.keep(self)

    def _empty(self, columns: int) -> tuple[Array, Array, Array]:
        shape = self._most, columns
        return (
            np.full(shape, np.inf, self._dtype),
            np.full(shape, -np.inf, self._dtype),
            np.zeros(shape, bool),
        )

    def widen(self, columns: int) -> None:
        """Have so many columns; the new ones have no values yet."""
        more = columns - self.low.shape[1]
        if more > 0:
            fresh = self._empty(more)
            self.low, self.high, self.bad = (
                np.concatenate(pair, axis=1)
                for pair in zip((self.low, self.high, self.bad), fresh, strict=True)
            )

    def add(self, slots: NDArray[np.int64], values: Array, present: Array, columns: Array) -> None:
        """Take in `values[n, c]` of the steps in these buckets; `columns[c]` says which columns they are of."""
        order = np.argsort(slots, kind="stable")
        slots, values, present = slots[order], values[order], present[order]
        fine = np.isfinite(values) & present
        starts = np.flatnonzero(np.diff(slots, prepend=-1))
        low, high, bad = values, values, None
        if not fine.all():
            low, high = np.where(fine, values, np.inf), np.where(fine, values, -np.inf)
            bad = np.logical_or.reduceat(present & ~fine, starts, axis=0)
        at = np.ix_(slots[starts], columns)
        self.low[at] = np.minimum(self.low[at], np.minimum.reduceat(low, starts, axis=0))
        self.high[at] = np.maximum(self.high[at], np.maximum.reduceat(high, starts, axis=0))
        if bad is not None:
            self.bad[at] |= bad

    def regroup(self, slots: NDArray[np.int64]) -> None:
        """As `Bucketed` says."""
        low, high, bad = self._empty(self.low.shape[1])
        for old, new in enumerate(slots):
            np.minimum(low[new], self.low[old], out=low[new])
            np.maximum(high[new], self.high[old], out=high[new])
            bad[new] |= self.bad[old]
        self.low, self.high, self.bad = low, high, bad


class Counts:
    """Sums of C columns per bucket, as of steps that were skipped."""

    def __init__(self, axis: StepAxis, columns: int) -> None:
        self.sums = np.zeros((axis.most, columns), np.int64)
        axis.keep(self)

    def add(self, slots: NDArray[np.int64], flags: Array) -> None:
        """Add `flags[n, C]` of the steps in these buckets."""
        np.add.at(self.sums, slots, flags)

    def regroup(self, slots: NDArray[np.int64]) -> None:
        """As `Bucketed` says."""
        sums = np.zeros_like(self.sums)
        np.add.at(sums, slots, self.sums[: len(slots)])
        self.sums = sums
