"""Turns of the series that are judged every N steps, each at a step of its own.

A series whose turn comes at a step without a value of it (no gradient, a module that is not called, a step that the
GradScaler rejected) is overdue: it is judged at the first step that has one. Otherwise what is absent with a period
that has a factor in common with N (a GAN, branches, heads in turn) would never be judged.

Axes: K series of one rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gradwatch.engine.columns_needed import first_step
from gradwatch.engine.judged_steps.staggered_reads import ByResidue
from gradwatch.engine.series import Index, Series
from gradwatch.records.snapshot import BoolArray, Snapshot

Columns = tuple[str, ...]
OverdueSeries = Mapping[str, BoolArray]
"""bool[K] by key of the series; only keys with some that are overdue."""
NO_SERIES_OVERDUE: OverdueSeries = MappingProxyType({})


class Turn(NamedTuple):
    """The series of one key whose turn it is: `mask` bool[K], their `positions` in K, their `sites` in S."""

    mask: BoolArray
    positions: Index
    sites: Index


InTurn = Mapping[str, Turn]
"""By key of the series; only keys of which some are in turn."""
NONE_IN_TURN: InTurn = MappingProxyType({})


class Turns:
    """The turns of the staggered series among these, with the columns that a rule reads of each."""

    __slots__ = ("_cadences", "_columns", "_late", "_series", "_usual")

    def __init__(self, rules: Iterable[tuple[Series, Columns]]) -> None:
        staggered = [(series, columns) for series, columns in rules if series.phases is not None]
        self._series = {series.key: series for series, _ in staggered}
        self._columns: dict[str, set[Columns]] = {}
        for series, columns in staggered:
            self._columns.setdefault(series.key, set()).add(columns)
        self._cadences = frozenset(series.every for series in self._series.values())
        self._usual = ByResidue(self._cadences, self._at_their_turn)
        # With what is overdue, which stays the same for long where something gets no gradient.
        self._late: tuple[OverdueSeries, ByResidue[InTurn]] = (NO_SERIES_OVERDUE, self._usual)

    def in_turn(self, step: int, overdue: OverdueSeries = NO_SERIES_OVERDUE) -> InTurn:
        """The series to be judged at a step: those whose turn it is, and those that are overdue."""
        if not overdue:
            return self._usual.at(step)
        if self._late[0] is not overdue:
            self._late = overdue, ByResidue(self._cadences, functools.partial(self._with, overdue))
        return self._late[1].at(step)

    def _with(self, overdue: OverdueSeries, step: int) -> InTurn:
        usual = self._usual.at(step)
        masks = {key: mask | usual[key].mask if key in usual else mask for key, mask in overdue.items()}
        return {**usual, **{key: _turn(self._series[key], mask) for key, mask in masks.items()}}

    def _at_their_turn(self, step: int) -> InTurn:
        found = {}
        for key, series in self._series.items():
            mask: BoolArray = np.asarray(series.phases) == step % series.every
            if step >= first_step(series.column) and mask.any():
                found[key] = _turn(series, mask)
        return found

    def missed(
        self, in_turn: InTurn, snapshot: Snapshot, before: OverdueSeries, judged: bool = True
    ) -> OverdueSeries:
        """Those of `in_turn` without a value in this Snapshot; all of them if the step was not `judged`.

        Gives `before` itself, what was overdue until this step, if nothing has changed.
        """
        found: dict[str, BoolArray] = {}
        for key, turn in in_turn.items():
            column = snapshot.columns.get(self._series[key].column) if judged else None
            if column is None:
                found[key] = turn.mask
                continue
            here: BoolArray = column.present[turn.sites]
            if not here.all():
                missed = turn.mask.copy()
                missed[turn.positions[here]] = False
                found[key] = missed
        same = found.keys() == before.keys() and all((found[key] == before[key]).all() for key in found)
        return before if same else found

    def sites(self, overdue: OverdueSeries, size: int) -> dict[Columns, BoolArray]:
        """By the columns of a rule, bool[S]: overdue sites, to be read at each step until they are judged."""
        found: dict[Columns, BoolArray] = {}
        for key, mask in overdue.items():
            for columns in self._columns[key]:
                known = found.setdefault(columns, np.zeros(size, np.bool_))
                known |= self._series[key].spread(mask, size)
        return found


def _turn(series: Series, mask: BoolArray) -> Turn:
    positions = np.flatnonzero(mask)
    return Turn(mask, positions, positions if series.index is None else series.index[positions])
