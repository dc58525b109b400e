"""Turns of the series that are judged every N steps, each at a step of its own.

A series whose turn comes at a step without a value of it (no gradient, a module that is not called, a step that the
GradScaler rejected) is overdue: it is judged at the first step that has one. Otherwise what is absent with a period
that has a factor in common with N (a GAN, branches, heads in turn) would never be judged.

Axes: K series of one rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gradwatch.engine.columns_needed import first_step
from gradwatch.engine.series import Index, Series
from gradwatch.engine.staggering import LAID_OUT
from gradwatch.records.snapshot import BoolArray, Snapshot

Columns = tuple[str, ...]
Overdue = Mapping[str, BoolArray]
"""bool[K] by key of the series; only keys with some that are overdue."""
NONE_OVERDUE: Overdue = MappingProxyType({})


class Turn(NamedTuple):
    """The series of one key whose turn it is: `mask` bool[K], their positions in K, and those of their sites in S."""

    mask: BoolArray
    positions: Index
    sites: Index


InTurn = Mapping[str, Turn]
"""By key of the series; only keys of which some are in turn."""
NONE_IN_TURN: InTurn = MappingProxyType({})


class Turns:
    """The turns of the staggered among these series: of each, and the columns that a rule reads of it."""

    __slots__ = ("_columns", "_period", "_series", "_usual")

    def __init__(self, rules: Iterable[tuple[Series, Columns]]) -> None:
        staggered = [(series, columns) for series, columns in rules if series.phases is not None]
        self._series = {series.key: series for series, _ in staggered}
        self._columns: dict[str, set[Columns]] = {}
        for series, columns in staggered:
            self._columns.setdefault(series.key, set()).add(columns)
        period = math.lcm(*(series.every for series in self._series.values()))
        self._period = period if period <= LAID_OUT else None
        self._usual: dict[int, InTurn] = {}

    def in_turn(self, step: int, overdue: Overdue = NONE_OVERDUE) -> InTurn:
        """The series to be judged at a step: those whose turn it is, and those that are overdue."""
        if self._period is None or step < 1:  # the first step has no update
            found = self._at_their_turn(step)
        else:
            residue = step % self._period
            if residue not in self._usual:
                self._usual[residue] = self._at_their_turn(self._period + residue)
            found = self._usual[residue]
        if not overdue:
            return found
        late = {key: mask | found[key].mask if key in found else mask for key, mask in overdue.items()}
        return {**found, **{key: _turn(self._series[key], mask) for key, mask in late.items()}}

    def _at_their_turn(self, step: int) -> InTurn:
        found = {}
        for key, series in self._series.items():
            mask: BoolArray = np.asarray(series.phases) == step % series.every
            if step >= first_step(series.column) and mask.any():
                found[key] = _turn(series, mask)
        return found

    def missed(self, in_turn: InTurn, snapshot: Snapshot, judged: bool = True) -> Overdue:
        """Those of `in_turn` without a value in this Snapshot; all of them where the step was not `judged`."""
        found = {}
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
        return found or NONE_OVERDUE

    def sites(self, overdue: Overdue, size: int) -> dict[Columns, BoolArray]:
        """bool[S] by the columns of a rule: sites that are overdue, to be read at each step until they are judged."""
        found: dict[Columns, BoolArray] = {}
        for key, mask in overdue.items():
            for columns in self._columns[key]:
                known = found.setdefault(columns, np.zeros(size, np.bool_))
                known |= self._series[key].spread(mask, size)
        return found


def _turn(series: Series, mask: BoolArray) -> Turn:
    positions = np.flatnonzero(mask)
    return Turn(mask, positions, positions if series.index is None else series.index[positions])
