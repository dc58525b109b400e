"""The phase of each site: at which steps a column that is read every N steps is read of it.

A column that costs a read of whole tensors is read of about 1/N of their elements at each step, rather than of all of
them at every Nth: the cost is even, and no value is older than N steps. The phases follow from the sizes of the sites
alone, so ranks agree on them, and a run that is resumed goes on with them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import BoolArray

Phases = NDArray[np.intp]

SMALLEST_PART = 1 << 16
"""Elements read at a step, at least, while there are so many: below, what costs is the call and not the element."""

LAID_OUT = 128
"""Steps for which `ByResidue` keeps what it has made."""
T = TypeVar("T")


class ByResidue(Generic[T]):
    """Values that depend on the step and repeat with the common period of some cadences; each is made once.

    If the period is longer than 128 steps, they are made at each step. Step 0 never repeats: no step came before it.
    """

    __slots__ = ("_kept", "_make", "_period")

    def __init__(self, cadences: Iterable[int], make: Callable[[int], T]) -> None:
        period = math.lcm(*cadences)
        self._period = period if period <= LAID_OUT else None
        self._make = make
        self._kept: dict[int, T] = {}

    def at(self, step: int) -> T:
        """The value of a step."""
        if self._period is None or step < 1:
            return self._make(step)
        residue = step % self._period
        if residue not in self._kept:
            self._kept[residue] = self._make(self._period + residue)
        return self._kept[residue]


class Staggering:
    """The phases of S sites, by cadence. A site of phase p is read at the steps s with s % every == p.

    `numels[S]` are the elements of each site. Sites without elements of their own (modules) take turns instead.
    """

    __slots__ = ("_by_cadence", "_numels")

    def __init__(self, numels: NDArray[np.int64]) -> None:
        self._numels = numels
        self._by_cadence: dict[int, Phases] = {}

    def __len__(self) -> int:
        """S."""
        return len(self._numels)

    def phases(self, every: int) -> Phases:
        """intp[S]: step modulo `every` at which each site is read."""
        if every not in self._by_cadence:
            self._by_cadence[every] = _phases(self._numels, every)
        return self._by_cadence[every]

    def due(self, every: int, step: int) -> BoolArray:
        """bool[S]: the sites that are read at this step."""
        due: BoolArray = self.phases(every) == step % every
        return due

    def of(self, own: NDArray[np.intp]) -> Staggering:
        """The phases of the sites at the positions `own`, unchanged."""
        return _Part(self, own)


class _Part(Staggering):
    """The phases of some sites of a whole."""

    __slots__ = ("_own", "_whole")

    def __init__(self, whole: Staggering, own: NDArray[np.intp]) -> None:
        super().__init__(whole._numels[own])
        self._whole, self._own = whole, own

    def phases(self, every: int) -> Phases:
        """intp[K]: as in the whole."""
        if every not in self._by_cadence:
            self._by_cadence[every] = self._whole.phases(every)[self._own]
        return self._by_cadence[every]


def _phases(numels: NDArray[np.int64], every: int) -> Phases:
    """Parts of nearly equal size, spread over the steps from step 1 on; at step 0 there is no update to look at.

    The largest first, each into the part that is smallest so far (longest processing time; Graham 1969): no part is
    larger than the mean and the largest site together.
    """
    phases = np.zeros(len(numels), np.intp)
    without = np.flatnonzero(numels == 0)
    phases[without] = (1 + np.arange(len(without))) % every
    total = int(numels.sum())
    count = min(every, -(-total // SMALLEST_PART))
    smallest = [(0, (1 + part * every // count) % every) for part in range(count)]
    heapq.heapify(smallest)
    for site in np.argsort(-numels, kind="stable")[: len(numels) - len(without)].tolist():
        size, phase = smallest[0]
        phases[site] = phase
        heapq.heapreplace(smallest, (size + int(numels[site]), phase))
    return phases
