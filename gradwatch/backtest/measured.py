"""Columns, modules and ranks that a process of a recorded run measured since its rules asked; others may miss them."""

from __future__ import annotations

from typing import NamedTuple

from gradwatch.records.columns import BATCH_HASH, COMPARING_RANKS, MODULE_COLUMNS, RANK_COLUMNS, is_scalar
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Sites
from gradwatch.rules.rule_set import Rule, RuleSet

ASKED_FOR = COMPARING_RANKS | {BATCH_HASH}
"""Columns of steps and ranks that are measured only where a rule reads them."""
NO_MODULES = (
    "the run tapped no module: record a run under these rules (`mode: shadow` has them act on nothing)"
)
NO_RANKS = (
    "the run compared no ranks: record a run under these rules (`mode: shadow` has them act on nothing)"
)
TAPPED = (
    "rules on modules are judged at the {} that the run tapped; whether these rules would tap others, which are not "
    "recorded, is not known"
)


class Measured(NamedTuple):
    """Measurements of one process: `columns` are those that its rules read, `modules` those that it tapped.

    `ranked` says that it compared `ranks`, the number of its launch. `digest` and `kinds` are of its rules.
    """

    columns: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    digest: str = ""
    ranks: int = 1
    modules: frozenset[str] = frozenset()
    ranked: bool = False

    def knows(self, column: str) -> bool:
        """True if the process would have had this column, had there been a value of it."""
        if column in RANK_COLUMNS:
            return self.ranked
        return column in self.columns or (is_scalar(column) and column not in ASKED_FOR)

    def without_sites(self, rule: Rule, ruleset: RuleSet) -> str:
        """The reason why what a rule is about may have been there and was not recorded; "" where it is recorded.

        Rules by which a run was recorded had all measured that they are about.
        """
        column = rule.detect.columns[0]
        if ruleset.digest == self.digest:
            return ""
        if column in MODULE_COLUMNS and ruleset.modules is not None and not self.modules:
            return NO_MODULES
        if column in RANK_COLUMNS and self.ranks > 1 and not self.ranked and rule.kind not in self.kinds:
            return NO_RANKS
        return ""

    def tapped(self, ruleset: RuleSet) -> frozenset[str]:
        """The modules that other rules of a file, on modules, are judged at; those of the run itself tap no others."""
        asks = any(rule.enabled and rule.detect.columns[0] in MODULE_COLUMNS for rule in ruleset.rules)
        return self.modules if asks and ruleset.digest != self.digest else frozenset()

    def with_sites(self, sites: Sites) -> Measured:
        """With modules and ranks that are among these sites."""
        names = zip(sites.names, sites.kinds, strict=True)
        modules = self.modules.union(name for name, kind in names if kind == "module")
        return self._replace(modules=modules, ranked=self.ranked or "rank" in sites.kinds)


def measured_by(run: RunInfo | None) -> Measured:
    """Measurements of a process by what it said of itself; None where nothing is left of that."""
    if run is None:
        return Measured()
    columns, kinds = frozenset(rule.of for rule in run.rules), frozenset(rule.kind for rule in run.rules)
    return Measured(columns, kinds, run.rules_digest, run.world_size)
