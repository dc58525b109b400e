"""Statistics and histograms of activations, read in the forwards of a step as rules ask for them.

A forward is one of the step if its module is in training mode. Nothing is kept of a tensor but numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.capture.columns.activation_values import Statistic
from gradwatch.capture.columns.histograms import HistogramTurns, PendingHistograms
from gradwatch.capture.columns.pending_columns import NO_SITES_OVERDUE, OverdueSites
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.judged_steps.staggered_reads import ByResidue, Staggering
from gradwatch.reading.layouts import elements, has_values
from gradwatch.taps import nested_containers

Due = Mapping[int, Sequence[str]]
"""Columns to be read, by module."""


class ActivationReader:
    """Reads the inputs of modules, or their outputs: `statistics` as `needs` says, in the turns of `staggering`.

    Histograms are read when `turns` says. Of several tensors the first of floating or complex numbers is read; of a
    module that is called several times in a step, the last call that has such elements.
    """

    def __init__(
        self,
        statistics: Mapping[str, Statistic],
        needs: Needs,
        staggering: Staggering,
        turns: HistogramTurns | None = None,
    ) -> None:
        self._by_column = statistics
        self._needs = needs.only(statistics)
        self._staggering = staggering
        self._turns = turns
        self.wanted = bool(self._needs.columns) or turns is not None
        self._at_their_turn = ByResidue(self._needs.cadences, self._due_at)
        # With what is overdue, which stays the same for long where a module is not called.
        self._late: tuple[OverdueSites, ByResidue[Due]] = (NO_SITES_OVERDUE, self._at_their_turn)
        self._statistics: dict[str, dict[int, Tensor]] = {}  # by column and module
        self._histograms: PendingHistograms | None = None
        self._histograms_due: frozenset[int] = frozenset()
        self.schedule(0)

    def schedule(self, step: int, overdue: OverdueSites = NO_SITES_OVERDUE) -> None:
        """Set what forwards read until the next call: what is due at this step, and what is `overdue` (bool[M])."""
        if self._late[0] is not overdue:
            self._late = (
                overdue,
                ByResidue(self._needs.cadences, functools.partial(self._due_at, overdue=overdue)),
            )
        self._due = (self._late[1] if overdue else self._at_their_turn).at(step)
        self._histograms_due = frozenset(() if self._turns is None else self._turns.due(step))

    def take_statistics(self) -> dict[str, dict[int, Tensor]]:
        """The statistics read since the last call, 0-dim tensors by column and module."""
        taken, self._statistics = self._statistics, {}
        return taken

    def take_histograms(self) -> PendingHistograms | None:
        """The histograms read since the last call; None where there is none."""
        taken, self._histograms = self._histograms, None
        if self._turns is not None:
            due = self._histograms_due
            self._turns.missed(tuple(due if taken is None else (m for m in due if m not in taken)))
        return taken

    def read(self, m: int, module: nn.Module, given: Any) -> None:
        """Read what is due of module m in the forward that takes this, or has put it out."""
        columns, counted = self._due.get(m, ()), m in self._histograms_due
        if not (columns or counted) or not module.training:
            return
        with torch.no_grad():
            found = _first_values(given)
            if found is None:
                return
            if columns:
                values = found if found.dtype is torch.float64 else found.float()
                for column in columns:
                    statistic = self._by_column[column](module, values, found.dtype)
                    if statistic is not None:
                        self._statistics.setdefault(column, {})[m] = statistic
            if counted:
                if self._histograms is None:
                    self._histograms = PendingHistograms(1.0)
                self._histograms.put(m, found)

    def _due_at(self, step: int, overdue: OverdueSites = NO_SITES_OVERDUE) -> Due:
        due: dict[int, list[str]] = {}
        for name in sorted(self._needs.columns):
            asked = [mask for columns, mask in overdue.items() if name in columns]
            in_turn = self._needs.due(name, step, self._staggering)
            asked += [] if in_turn is None else [in_turn]
            for m in np.flatnonzero(np.logical_or.reduce(asked)).tolist() if asked else ():  # sync: numpy
                due.setdefault(m, []).append(name)
        return due


def _first_values(tree: Any) -> Tensor | None:
    """The elements of the first tensor of floating or complex numbers, dense; None where there are none."""
    for leaf in nested_containers.leaves(tree):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            found = elements(leaf.detach())
            return found if found.numel() and has_values(found) else None
    return None
