"""Parameters that a staggered rule has never judged, though their turn came: nothing of theirs had a value then.

Others of the rule may have been judged, so that its silence seems to cover all of them. Modules are left out: many hold
others and are never called themselves, or have no such column (`activation_saturation` of a Linear).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import Snapshot


class StaggeredSeries(NamedTuple):
    """K parameters, of these `names`, that `rules` judge on a column every so many steps."""

    column: str
    every: int
    names: tuple[str, ...]
    rules: tuple[str, ...]


class _Unjudged:
    """One of these series: which were not judged so far, and the step at which their turn came first (-1: not yet)."""

    def __init__(self, series: StaggeredSeries, judged: frozenset[str]) -> None:
        self.series = series
        self.waiting = np.array([name not in judged for name in series.names], np.bool_)
        self.asked: NDArray[np.int64] = np.full(len(series.names), -1, np.int64)

    def judged(self) -> frozenset[str]:
        """The names of the others."""
        return frozenset(np.array(self.series.names, object)[~self.waiting])

    def observe(self, turn: Any, snapshot: Snapshot) -> None:
        """Note which of those in `turn` have a value in this Snapshot."""
        positions = turn.positions
        self.asked[positions[self.asked[positions] < 0]] = snapshot.step
        column = snapshot.columns.get(self.series.column)
        if column is not None and not (snapshot.provisional or snapshot.scalars.get("scaler_skip")):
            self.waiting[positions[column.present[turn.sites]]] = False

    def names(self, last: int) -> list[str]:
        """Those not judged so far whose turn came a whole period before the step `last`."""
        late = self.waiting & (self.asked >= 0) & (self.asked + self.series.every <= last)
        return [self.series.names[k] for k in np.flatnonzero(late).tolist()]  # sync: numpy


class NeverJudged:
    """These parameters, by optimizer; a step costs nothing any more once all were judged."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, _Unjudged]] = {}
        self._done: dict[int, dict[str, frozenset[str]]] = {}  # names of series that were judged whole
        self._last: dict[int, int] = {}

    def bind(self, optimizer: int, series: Mapping[str, StaggeredSeries]) -> None:
        """The staggered series of one optimizer, by key, from now on; what was judged of them before stays so."""
        before = {key: one.judged() for key, one in self._open.get(optimizer, {}).items()}
        before = {**self._done.get(optimizer, {}), **before}
        made = {key: _Unjudged(one, before.get(key, frozenset())) for key, one in series.items()}
        self._done[optimizer] = {key: one.judged() for key, one in made.items() if not one.waiting.any()}
        self._open[optimizer] = {key: one for key, one in made.items() if one.waiting.any()}

    def observe(self, snapshot: Snapshot, in_turn: Mapping[str, Any]) -> None:
        """Take one step, with the series that were in turn at it."""
        waiting = self._open.get(snapshot.optimizer)
        if not waiting:
            return
        self._last[snapshot.optimizer] = snapshot.step
        for key, turn in in_turn.items():
            one = waiting.get(key)
            if one is None:
                continue
            one.observe(turn, snapshot)
            if not one.waiting.any():
                self._done[snapshot.optimizer][key] = one.judged()
                waiting = {other: left for other, left in waiting.items() if other != key}
        self._open[snapshot.optimizer] = waiting

    def by_rule(self) -> dict[str, tuple[str, ...]]:
        """The names of these parameters by rule."""
        found: dict[str, list[str]] = {}
        for optimizer, waiting in list(self._open.items()):
            for one in waiting.values():
                names = one.names(self._last.get(optimizer, -1))
                for rule in one.series.rules if names else ():
                    found[rule] = [*found.get(rule, ()), *names]
        return {rule: tuple(dict.fromkeys(names)) for rule, names in found.items()}
