"""The part of a recorded run that each rule was judged on: what was not recorded is said, never passed over.

Axes: S sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from gradwatch.account.rules_without_data import BEFORE_ITS_STEP, NEVER_CAME
from gradwatch.backtest.measured import ASKED_FOR, Measured
from gradwatch.engine.bound_engine import BoundEngine
from gradwatch.engine.columns_needed import OF_UPDATES, first_step
from gradwatch.engine.judged_steps.staggered_judging import InTurn
from gradwatch.engine.series import Series
from gradwatch.records.columns import (
    ALWAYS,
    OBSERVED,
    OTHER_RULES,
    RANK_COLUMNS,
    is_scalar,
    scalar_name,
)
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.condition import When
from gradwatch.rules.rule_set import Rule, RuleSet

Extent = Literal["whole", "part", "not recorded", "no data", "no site"]
"""A rule was judged on the whole run or on a part of it; what it reads was not recorded; the run itself had no values
of that, or too few to learn from; or the rule is about nothing that this model has."""
ENOUGH = 0.9
"""Least share, of the values that a rule would have read live, that is recorded where it counts as judged whole."""
GAP = (
    "norms of parameters were not recorded at every step from step {} on (the journal was thinned, or samples them): "
    "record runs with `sinks: [journal: {{params: full, max_bytes: 0}}]`"
)
STEPS_MISSING = (
    "steps before step {} are missing from the journal, and with them what the baseline would have learned"
)
DEPENDS = "it depends on {}, not judged on the whole run"
NOT_ASKED = (
    "{} was not recorded, as no rule of the run read it: record a run under these rules (`mode: shadow` has them act "
    "on nothing)"
)
NEVER = "the run had no value of {}"
RARELY = (
    "{} was recorded {:,} times of the {:,} that the rule would have read it: the run read it at other steps"
)
WENT_ON = "a process went on with what it had learned before, which is in no journal: learned anew, {}"
CLIPPED = (
    "from step {} on {} holds what gradwatch itself did to the gradients of the run, and what it was before is not "
    "recorded"
)
AFTER_CLIPS = frozenset({"norm_applied", "coef"})
"""Columns that are other ones where gradwatch has changed the gradients of a step."""


@dataclass(frozen=True, slots=True)
class RuleCoverage:
    """The part of a run that one rule was judged on: `judged` of `steps` recorded; `why` not on all of them.

    `optional`: it may well be about nothing that this model has.
    """

    rule: str
    extent: Extent
    judged: int
    steps: int
    why: str = ""
    optional: bool = False


@dataclass(slots=True)
class _Values:
    """Values of one column that a rule would have read live, and those of them that are recorded.

    `cadence`: what all steps with a value are multiples of, whether the rule would have read it there or not; None
    where there was none.
    """

    due: int = 0
    recorded: int = 0
    cadence: int | None = None


class _Watched(NamedTuple):
    """A series whose column not every step has, and its values so far."""

    series: Series
    column: str
    staggered: bool
    every: int
    values: _Values


@dataclass(slots=True)
class OptimizerCoverage:
    """The steps and values that the rules of one optimizer were judged on, in one process; `last` is the last step.

    `went_on`: the process began with what others had learned; `warming_up` are the rules whose baselines have not had
    the samples that they need, with how many they had; `measured` is what the process measured.
    """

    steps: int = 0
    last: int = -1
    went_on: bool = False
    measured: Measured = field(default_factory=Measured)
    warming_up: Mapping[str, str] = field(default_factory=dict)
    _inactive: Mapping[str, str] = field(default_factory=dict)
    _dropped: dict[str, tuple[int, str]] = field(default_factory=dict)
    _engine: BoundEngine | None = None
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _by_rule: dict[str, tuple[_Watched, ...]] = field(default_factory=dict)

    def process_ended(self, measured: Measured, warming_up: Mapping[str, str]) -> None:
        """Keep what the process had measured, and the rules that were still `warming_up`, when it ended."""
        self.measured, self.warming_up = measured, warming_up

    def take(self, snapshot: Snapshot, engine: BoundEngine, in_turn: InTurn, skipped: bool = False) -> None:
        """Count one step, and the values of columns that not every step has; one that was `skipped` has no update."""
        self.steps += 1
        self.last = snapshot.step
        if engine is not self._engine:
            self._bind(engine)
        if snapshot.provisional or snapshot.scalars.get("scaler_skip"):
            return
        for one in self._watched.values():
            if skipped and one.column in OF_UPDATES:
                continue
            if one.column in ASKED_FOR and (one.column in snapshot.columns or one.column in snapshot.scalars):
                one.values.cadence = math.gcd(one.values.cadence or 0, snapshot.step)
            if one.staggered:
                _take_turns(one, snapshot, engine, in_turn)
            elif snapshot.step % one.every == 0 and snapshot.step >= first_step(one.column):
                _take_whole(one, snapshot)

    def _bind(self, engine: BoundEngine) -> None:
        """Watch the columns of these bound rules; values that were counted before go on."""
        before, self._watched, self._engine = self._watched, {}, engine
        for plan in engine.plan.rules:
            mine = []
            first, *beside = plan.rule.detect.columns
            every = math.lcm(plan.rule.every, getattr(plan.rule.detect, "one_in", 1))
            for column in (first, *(each for each in beside if not is_scalar(each))):
                if column not in ALWAYS and column != OTHER_RULES:
                    key = f"{plan.series.key}|{column}|{every}"
                    values = before[key].values if key in before else _Values()
                    one = _Watched(plan.series, column, plan.rule.staggered, every, values)
                    mine.append(self._watched.setdefault(key, one))
            self._by_rule[plan.rule.id] = tuple(mine)
        self._inactive = {rule: why for rule, why in engine.inactive.items() if rule not in self._by_rule}

    def drop(self, rules: Iterable[str], why: str) -> None:
        """Note that these rules are judged no more."""
        for rule in rules:
            self._dropped.setdefault(rule, (self.steps, why))

    def of(self, rule: Rule, ruleset: RuleSet) -> RuleCoverage:
        """The coverage of one rule of a file."""
        if rule.id in self._inactive:
            missing = self.measured.without_sites(rule, ruleset)
            if missing:
                return RuleCoverage(rule.id, "not recorded", 0, self.steps, missing)
            return RuleCoverage(rule.id, "no site", 0, self.steps, self._inactive[rule.id])
        judged, why = self._dropped.get(rule.id, (self.steps, ""))
        extent: Extent = "not recorded" if not judged else "part" if rule.id in self._dropped else "whole"
        if extent == "not recorded":
            return RuleCoverage(rule.id, extent, 0, self.steps, why)
        if self.last < rule.from_step:
            why = BEFORE_ITS_STEP.format(rule.from_step, self.last)
            return RuleCoverage(rule.id, "no data", 0, self.steps, why)
        for one in self._by_rule.get(rule.id, ()):
            values, column = one.values, one.column
            if values.recorded < ENOUGH * values.due and _looked_at_elsewhere(one):
                said = RARELY.format(shown(column), values.recorded, values.due)
                if not values.recorded:
                    return RuleCoverage(rule.id, "not recorded", 0, self.steps, said)
                extent, why = "part", f"{why}; {said}" if why else said
            elif not values.recorded and (self.measured.knows(column) or not values.due):
                reason = NEVER_CAME.get(column, NEVER.format(shown(column)))
                return RuleCoverage(rule.id, "no data", 0, self.steps, reason)
            elif not values.recorded:
                return RuleCoverage(rule.id, "not recorded", 0, self.steps, NOT_ASKED.format(shown(column)))
        if rule.id in self.warming_up and not why:
            lacking = self.warming_up[rule.id]
            if self.went_on:
                return RuleCoverage(rule.id, "not recorded", 0, self.steps, WENT_ON.format(lacking))
            return RuleCoverage(rule.id, "no data", 0, self.steps, lacking)
        return RuleCoverage(rule.id, extent, judged, self.steps, why)


def _looked_at_elsewhere(one: _Watched) -> bool:
    """True if values are absent because the run looked for them at other steps, and not because there were none."""
    values = one.values
    if one.column in ASKED_FOR:
        return values.cadence is not None and (not values.cadence or one.every % values.cadence != 0)
    return values.recorded > 0 and not is_scalar(one.column)


def _take_turns(one: _Watched, snapshot: Snapshot, engine: BoundEngine, in_turn: InTurn) -> None:
    """Count the values of a series of which each site is read at a step of its own."""
    key = one.series.key
    usual = engine.turns.in_turn(snapshot.step).get(key)
    if usual is not None:
        one.values.due += int((snapshot.calls[usual.sites] > 0).sum())
    column, turn = snapshot.columns.get(one.column), in_turn.get(key)
    if column is not None and turn is not None:
        one.values.recorded += int(column.present[turn.sites].sum())


def _take_whole(one: _Watched, snapshot: Snapshot) -> None:
    """Count the values of a series that is read as a whole."""
    if is_scalar(one.column):
        one.values.due += 1
        one.values.recorded += snapshot.scalar(one.column) is not None
        return
    here = slice(None) if one.series.index is None else one.series.index
    of_ranks = one.column in RANK_COLUMNS  # their sites are never called
    one.values.due += len(one.series) if of_ranks else int((snapshot.calls[here] > 0).sum())
    column = snapshot.columns.get(one.column)
    if column is not None:
        one.values.recorded += int(column.present[here].sum())


def shown(column: str) -> str:
    """A column as a sentence names it."""
    return f"`{scalar_name(column)}`" if column.startswith(OBSERVED) else f"`{column}`"


def joined(ruleset: RuleSet, optimizers: Sequence[OptimizerCoverage]) -> list[RuleCoverage]:
    """The coverage of each enabled rule over all optimizers of a run, in the order of the file."""
    found: dict[str, RuleCoverage] = {}
    for rule in ruleset.rules:
        if rule.enabled:
            one = _sum([one.of(rule, ruleset) for one in optimizers], rule)
            found[rule.id] = replace(one, optional=rule.optional)
    partly = with_dependents(
        ruleset, (rule for rule, one in found.items() if one.extent in ("part", "not recorded"))
    )
    for rule in ruleset.rules:
        others = [other for other in named_by(rule) if other in partly]
        if not (rule.enabled and others):
            continue
        names = ", ".join(f"`{other}`" for other in others)
        one, why = found[rule.id], DEPENDS.format(names)
        if one.extent == "whole":
            found[rule.id] = replace(one, extent="part", why=why)
        elif isinstance(rule.detect, When) and one.extent in ("no data", "no site"):
            found[rule.id] = replace(one, extent="not recorded", why=why)
    return list(found.values())


def _sum(parts: Sequence[RuleCoverage], rule: Rule) -> RuleCoverage:
    """One rule on several optimizers: what it has no data of on one of them it may have on another, as live."""
    steps = sum(one.steps for one in parts)
    for extent in ("no data", "no site"):
        rest = [one for one in parts if one.extent != extent]
        if not rest:
            why = parts[0].why if parts else "no step was recorded"
            return RuleCoverage(rule.id, extent, 0, steps, why)
        parts = rest
    judged, steps = sum(one.judged for one in parts), sum(one.steps for one in parts)
    why = next((one.why for one in parts if one.why), "")
    extents = {one.extent for one in parts}
    extent = extents.pop() if len(extents) == 1 else "part"
    return RuleCoverage(rule.id, extent, judged, steps, why)


def named_by(rule: Rule) -> tuple[str, ...]:
    """The ids of the rules that this one depends on: of its condition, those that suspend it, those that inhibit it."""
    condition = rule.detect.condition.rules() if isinstance(rule.detect, When) else ()
    return (*condition, *rule.unless, *rule.inhibited_by)


def with_dependents(ruleset: RuleSet, rules: Iterable[str]) -> frozenset[str]:
    """These rules, and all that depend on one of them."""
    found = set(rules)
    while more := {
        rule.id for rule in ruleset.rules if rule.id not in found and not found.isdisjoint(named_by(rule))
    }:
        found |= more
    return frozenset(found)


def reads_sites(rule: Rule) -> bool:
    """True if a rule reads a column of parameters or modules."""
    detectors = [rule.detect] if rule.detect.second is None else [rule.detect, rule.detect.second]
    return any(not is_scalar(column) for one in detectors for column in one.columns)


def has_baseline(rule: Rule) -> bool:
    """True if a rule judges a step by what it has learned of others."""
    return any(one is not None and one.has_baseline for one in (rule.detect, rule.detect.second))


def skips_by_sites(rule: Rule) -> bool:
    """True if a rule has steps skipped for a NaN or Inf in gradients, so that nothing learns of them."""
    return rule.acts and rule.detect.finiteness and reads_sites(rule)
