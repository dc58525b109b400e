"""Columns that the capture must read beyond the free ones, and their steps: the union over all rules.

A rule judges a column of `SAMPLED` from whole tensors, at its own steps (step % every == 0) and at no others. One that
neither acts nor says how often judges a sample instead, in bursts (`Rule.bursts`): that is a column of its own, named
with `BURSTS`, so that what one rule asks for never changes what another sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradwatch.rules.rule_set import SAMPLED, Rule

BURSTS = ":bursts"
"""After the name of a column that holds what was read in bursts."""
PERIOD = 100
BURST = 3


@dataclass(frozen=True, slots=True)
class Needs:
    """`columns` to be read; `every` says of each that is not read in bursts which divisors of a step it is due at."""

    columns: frozenset[str] = frozenset()
    every: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def due(self, column: str, step: int) -> bool:
        """True if a column is read at this step."""
        if column not in self.columns:
            return False
        plain = column.removesuffix(BURSTS)
        # The update of step s is seen at the boundary of s + 1, so there is none at step 0.
        first = 1 if plain == "update_ratio" else 0
        if step < first:
            return False
        if plain is not column:  # three steps in a row, so that `for: 3` can be met
            return (step - first) % PERIOD < BURST
        return any(step % every == 0 for every in self.every.get(column, EVERY_STEP))

    def next_due(self, column: str, step: int) -> int | None:
        """The first step after this one at which a column is read; None where it is not asked for."""
        if column not in self.columns:
            return None
        plain = column.removesuffix(BURSTS)
        first = 1 if plain == "update_ratio" else 0
        later = max(step + 1, first)
        if plain is not column:
            past = (later - first) % PERIOD
            return later if past < BURST else later + PERIOD - past
        return min(later + -later % every for every in self.every.get(column, EVERY_STEP))

    def only(self, columns: Iterable[str]) -> Needs:
        """The needs restricted to some columns, by their plain names."""
        chosen = frozenset(columns)
        return Needs(
            frozenset(name for name in self.columns if name.removesuffix(BURSTS) in chosen), self.every
        )


EVERY_STEP = frozenset({1})


def source_of(rule: Rule, column: str) -> str:
    """The name under which a rule finds one of the columns of its detector in a Snapshot."""
    return column + BURSTS if rule.bursts and column in SAMPLED else column


def needs_of(rules: Iterable[Rule], free: frozenset[str]) -> Needs:
    """Columns that these rules need beyond the columns of `free`."""
    every: dict[str, frozenset[int]] = {}
    columns: set[str] = set()
    for rule in rules:
        for column in rule.detect.columns:
            if column not in free:
                source = source_of(rule, column)
                columns.add(source)
                every[source] = every.get(source, frozenset()) | {rule.every}
    return Needs(frozenset(columns), every)
