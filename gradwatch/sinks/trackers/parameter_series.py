"""Series of single parameters for an experiment tracker: norms, and the columns that rules have read of whole tensors.

A column that is read in turns comes of a few parameters at each step. Each value is sent at the step that it was
measured at: columns no more often than every so many steps, the norm with every point.

S sites.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.record import Record
from gradwatch.records.snapshot import BoolArray, FloatArray, Sites, Snapshot
from gradwatch.runtime.printable import distinct
from gradwatch.sinks.parameter_selection import OF_PARAMETERS, ParameterChoice, Selection, SeriesBudget

LEFT_OUT = "param_series_left_out"
LEFT_OUT_NOTICE = (
    "series of some parameters are not sent, for `max_series` of them are ({}); the series "
    f"`gradwatch/{LEFT_OUT}` counts them: choose fewer with `params` and `match`, or raise `max_series`"
)
NEVER = -(1 << 62)


class ParameterSeries:
    """The series of all optimizers, at most `max_series` of one parameter and one column each, for the sink's life."""

    def __init__(self, choice: ParameterChoice, every: int) -> None:
        self._choice, self._every = choice, every
        self._selected = SeriesBudget(choice.max_series)
        self._budget = SeriesBudget(choice.max_series)
        self._of: dict[int, _OfOptimizer] = {}

    @property
    def left_out(self) -> int:
        """Number of series that found no room."""
        return sum(one.left_out for one in self._of.values())

    def values(self, record: Record, due: bool) -> Iterator[tuple[str, float]]:
        """The values of one step by name; those that every step has only where a point is `due`."""
        optimizer = record.snapshot.optimizer
        if optimizer not in self._of:
            selection = Selection(self._choice.params, self._choice.top_k, self._choice.match, self._selected)
            self._of[optimizer] = _OfOptimizer(selection, self._budget, self._every)
        return self._of[optimizer].values(record, due)


class _OfOptimizer:
    """The series of one optimizer: who is chosen, which series have room, and when each was sent last."""

    def __init__(self, selection: Selection, budget: SeriesBudget, every: int) -> None:
        self._selection, self._budget, self._every = selection, budget, every
        self._sites: Sites | None = None
        self._names: list[str] = []
        self._sent: dict[str, NDArray[np.int64]] = {}
        self._admitted: set[str] = set()
        self._refused: set[str] = set()
        self._unselected = 0

    @property
    def left_out(self) -> int:
        """Number of series that found no room: of parameters that were chosen, and of those that could not be."""
        return len(self._refused) + self._unselected

    def values(self, record: Record, due: bool) -> Iterator[tuple[str, float]]:
        """The values of one step by name."""
        snapshot = record.snapshot
        self._selection.update(record)
        chosen = self._selection.chosen
        if chosen is None:
            return
        self._unselected = chosen.dropped
        if not len(chosen.indices):
            return
        if self._sites is not snapshot.sites:
            self._sites, self._names = snapshot.sites, distinct(snapshot.sites.names)
            self._sent.clear()
        if due:
            present = snapshot.calls[chosen.indices] > 0
            yield from self._admitted_of("norm", snapshot.norm, chosen.indices[present])
        for column in OF_PARAMETERS:
            measured = snapshot.columns.get(column)
            if measured is not None:
                sites = self._waiting(column, snapshot, chosen.indices, measured.present)
                yield from self._admitted_of(column, measured.values, sites)

    def _waiting(
        self, column: str, snapshot: Snapshot, chosen: NDArray[np.intp], present_S: BoolArray
    ) -> NDArray[np.intp]:
        """The chosen sites with a value that is due: none was sent in the last so many steps."""
        sent = self._sent.get(column)
        if sent is None:
            sent = self._sent[column] = np.full(len(snapshot.sites), NEVER, np.int64)
        sites = chosen[present_S[chosen] & (snapshot.step - sent[chosen] >= self._every)]
        sent[sites] = snapshot.step
        return sites

    def _admitted_of(
        self, column: str, values_S: FloatArray, sites: NDArray[np.intp]
    ) -> Iterator[tuple[str, float]]:
        """The values of these sites whose series has room, by name."""
        for site in sites.tolist():
            name = f"param_{column}/{self._names[site]}"
            if name in self._admitted or self._admit(name):
                yield name, float(values_S[site])

    def _admit(self, name: str) -> bool:
        if self._budget.take():
            self._admitted.add(name)
            self._refused.discard(name)
            return True
        self._refused.add(name)
        return False
