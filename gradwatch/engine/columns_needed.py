"""Columns that the capture must read beyond the norms, of which sites and at which steps: the union over all rules.

A rule judges a column of `COSTLY_COLUMNS` at its own cadence and at no other, however often another rule asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.judged_steps.staggered_reads import Staggering
from gradwatch.records.columns import BATCH_HASH, OPTIMIZER_STATE, is_free
from gradwatch.records.snapshot import BoolArray
from gradwatch.rules.rule_set import Rule, RuleSet

EVERY_STEP = frozenset({1})
OF_UPDATES = frozenset({"update_norm", "update_ratio"})
"""Columns that compare weights with those of the step before."""
AFTER_A_STEP = OF_UPDATES | OPTIMIZER_STATE
"""Columns without a value before the first step has been taken."""
Cadences = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Needs:
    """Cadences by column, in optimizer steps.

    `whole` are those at which all sites are read together, `staggered` those at which each site is read at its own
    phase. `about` are bool[S] by column: the sites that any rule judges by it; a column that is not there is read of
    all sites.
    """

    whole: Cadences = field(default_factory=dict)
    staggered: Cadences = field(default_factory=dict)
    about: Mapping[str, BoolArray] = field(default_factory=dict)

    @property
    def columns(self) -> frozenset[str]:
        """The columns to be read."""
        return frozenset(self.whole) | frozenset(self.staggered)

    @property
    def cadences(self) -> frozenset[int]:
        """Every cadence that occurs."""
        return frozenset().union(*self.whole.values(), *self.staggered.values())

    def due(self, column: str, step: int, staggering: Staggering) -> BoolArray | None:
        """bool[S]: the sites of which a column is read at this step; None if it is read of none."""
        if step < first_step(column):
            return None
        due: BoolArray = np.zeros(len(staggering), np.bool_)
        for every in self.staggered.get(column, ()):
            due |= staggering.due(every, step)
        if any(step % every == 0 for every in self.whole.get(column, ())):
            due = np.ones(len(staggering), np.bool_)
        if column in self.about:
            due = due & self.about[column]
        return due if due.any() else None

    def next_due(self, column: str, step: int, staggering: Staggering) -> int | None:
        """The first step after this one at which a column is read of any site; None if no rule asks for it."""
        later = max(step + 1, first_step(column))
        about = self.about.get(column)
        if about is not None and not about.any():
            return None
        found = [later + -later % every for every in self.whole.get(column, ())]
        for every in self.staggered.get(column, ()):
            phases = staggering.phases(every) if about is None else staggering.phases(every)[about]
            found.append(later + int(((phases - later) % every).min(initial=every)))
        return min(found, default=None)

    def only(self, columns: Iterable[str]) -> Needs:
        """The needs restricted to some columns."""
        chosen = frozenset(columns)
        whole, staggered = (
            {name: cadences for name, cadences in one.items() if name in chosen}
            for one in (self.whole, self.staggered)
        )
        return Needs(whole, staggered, self.about)

    def at(self, every: int) -> Needs:
        """The needs restricted to one cadence."""
        whole, staggered = (
            {name: frozenset({every}) for name, cadences in one.items() if every in cadences}
            for one in (self.whole, self.staggered)
        )
        return Needs(whole, staggered, self.about)

    def of(self, own: NDArray[np.intp]) -> Needs:
        """The needs of the sites at the positions `own`."""
        return Needs(self.whole, self.staggered, {name: about[own] for name, about in self.about.items()})


def first_step(column: str) -> int:
    """The first step that has a value of a column; 1 where the column compares with the step before, else 0."""
    return 1 if column in AFTER_A_STEP else 0


def needs_of(rules: Iterable[Rule]) -> Needs:
    """Columns that these rules need beyond the free ones."""
    whole: dict[str, frozenset[int]] = {}
    staggered: dict[str, frozenset[int]] = {}
    for rule in rules:
        cadences = staggered if rule.staggered else whole
        for column in rule.detect.columns:
            if not is_free(column):
                cadences[column] = cadences.get(column, frozenset()) | {rule.every}
    return Needs(whole, staggered)


def batches_hashed_every(ruleset: RuleSet) -> tuple[int, ...]:
    """The cadences N at which rules read the hash of a batch: at steps with step % N = 0 for any of them."""
    cadences = {
        math.lcm(rule.judged_every, getattr(rule.detect, "one_in", 1))
        for rule in ruleset.rules
        if rule.enabled and BATCH_HASH in rule.detect.columns
    }
    return tuple(sorted(cadences))
