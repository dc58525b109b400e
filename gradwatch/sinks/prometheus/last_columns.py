"""Last values of the columns of single parameters: read in turns, they are of several steps.

S sites.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import BoolArray, Sites, Snapshot
from gradwatch.sinks.parameter_selection import OF_PARAMETERS

AT_ONCE = 16
"""Steps whose columns wait to be merged: together in warm caches they cost the training a third of one by one."""


class LastColumns:
    """The last value of each column of each parameter of one optimizer; NaN where that was measured."""

    def __init__(self) -> None:
        self._sites: Sites | None = None
        self._waiting: list[Snapshot] = []
        self._values: dict[str, NDArray[np.float64]] = {}
        self._present: dict[str, BoolArray] = {}

    def observe(self, snapshot: Snapshot) -> None:
        """Take the columns of one step."""
        self._waiting.append(snapshot)
        if len(self._waiting) >= AT_ONCE:
            self._merge()

    def of(self, sites: Sites, indices: NDArray[np.intp]) -> Iterator[tuple[str, int, float]]:
        """(column, index into `sites`, value) of those among `indices`, by column in the order of the catalogue."""
        self._merge()
        if self._sites is not sites:
            return
        for name in OF_PARAMETERS:
            if name in self._values:
                values, present = self._values[name], self._present[name]
                for index in indices[present[indices]].tolist():
                    yield name, index, float(values[index])

    def _merge(self) -> None:
        waiting, self._waiting = self._waiting, []
        for snapshot in waiting:
            if self._sites is not snapshot.sites:
                self._sites = snapshot.sites
                self._values.clear()
                self._present.clear()
            for name, column in snapshot.columns.items():
                if name not in _OF_PARAMETERS:
                    continue
                if name not in self._values:
                    self._values[name] = np.zeros(len(snapshot.sites))
                    self._present[name] = np.zeros(len(snapshot.sites), np.bool_)
                np.copyto(self._values[name], column.values, where=column.present)
                self._present[name] |= column.present


_OF_PARAMETERS = frozenset(OF_PARAMETERS)


class ColumnSeries:
    """The series of columns that one sink has begun: at most `max_series` for its whole life."""

    def __init__(self, max_series: int) -> None:
        self._left = max_series
        self._admitted: set[tuple[int, str, str]] = set()
        self._refused: set[tuple[int, str, str]] = set()

    def admit(self, optimizer: int, column: str, param: str) -> bool:
        """True if there is room for this series, or it was begun before."""
        key = optimizer, column, param
        if key in self._admitted:
            return True
        if self._left <= 0:
            self._refused.add(key)
            return False
        self._left -= 1
        self._admitted.add(key)
        return True

    def refused(self, optimizer: int) -> int:
        """Number of series of an optimizer that found no room."""
        return sum(key[0] == optimizer for key in self._refused)

    def drop(self, optimizer: int) -> None:
        """Drop the series of an optimizer that is shown no more: they make room for others."""
        gone = {key for key in self._admitted if key[0] == optimizer}
        self._left += len(gone)
        self._admitted -= gone
        self._refused = {key for key in self._refused if key[0] != optimizer}
