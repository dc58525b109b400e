"""Columns that the capture must read beyond the free ones, and of which sites at which steps: the union over all rules.

A rule judges a column of `SAMPLED` at its own cadence and at no other, however often another rule asks for the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gradwatch.engine.staggering import Staggering
from gradwatch.records.snapshot import BoolArray
from gradwatch.rules.rule_set import Rule

EVERY_STEP = frozenset({1})
Cadences = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Needs:
    """Cadences by column: `whole` those at which all sites are read together, `staggered` each site at its phase."""

    whole: Cadences = field(default_factory=dict)
    staggered: Cadences = field(default_factory=dict)

    @property
    def columns(self) -> frozenset[str]:
        """The columns to be read."""
        return frozenset(self.whole) | frozenset(self.staggered)

    def due(self, column: str, step: int, staggering: Staggering, size: int) -> BoolArray | None:
        """bool[S]: the sites of which a column is read at this step; None where it is none of the `size` sites."""
        if step < first_step(column):
            return None
        if any(step % every == 0 for every in self.whole.get(column, ())):
            return np.ones(size, np.bool_)
        due: BoolArray | None = None
        for every in self.staggered.get(column, ()):
            part = staggering.due(every, step)
            due = part if due is None else due | part
        return None if due is None or not due.any() else due

    def next_due(self, column: str, step: int, staggering: Staggering) -> int | None:
        """The first step after this one at which a column is read of any site; None where it is not asked for."""
        later = max(step + 1, first_step(column))
        found = [later + -later % every for every in self.whole.get(column, ())]
        for every in self.staggered.get(column, ()):
            found.append(later + int(((staggering.phases(every) - later) % every).min(initial=every)))
        return min(found, default=None)

    def only(self, columns: Iterable[str]) -> Needs:
        """The needs restricted to some columns."""
        chosen = frozenset(columns)
        whole, staggered = (
            {name: cadences for name, cadences in one.items() if name in chosen}
            for one in (self.whole, self.staggered)
        )
        return Needs(whole, staggered)


def first_step(column: str) -> int:
    """The first step with a value of a column: the update of step s is seen at the boundary of s + 1."""
    return 1 if column == "update_ratio" else 0


def needs_of(rules: Iterable[Rule], free: frozenset[str]) -> Needs:
    """Columns that these rules need beyond the columns of `free`."""
    needs = Needs({}, {})
    for rule in rules:
        cadences = needs.staggered if rule.staggered else needs.whole
        for column in rule.detect.columns:
            if column not in free:
                cadences[column] = cadences.get(column, frozenset()) | {rule.every}  # type: ignore[index]
    return needs
