"""A rule file bound to the sites of one optimizer: the series that each rule judges, the baselines they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gradwatch.detectors import Detector, Sample, State
from gradwatch.engine.clipping.bind_clip_section import bind_clipping
from gradwatch.engine.clipping.clip_section_factors import NO_CLIPPING, Clipping
from gradwatch.engine.columns_needed import Needs, needs_of
from gradwatch.engine.conditions.bind_conditions import conditions_of, never_known
from gradwatch.engine.conditions.bound_condition import BoundCondition
from gradwatch.engine.judged_steps.stages import WHOLE_RUN, Stage, stages_of
from gradwatch.engine.judged_steps.staggered_reads import Staggering
from gradwatch.engine.series import Series, roots_of, series_of
from gradwatch.engine.snapshot_reader import Reader
from gradwatch.records.columns import MODULE_COLUMNS, RANK_COLUMNS, is_free
from gradwatch.records.snapshot import BoolArray, FloatArray, Sites
from gradwatch.rules.condition import When
from gradwatch.rules.rule_set import Action, Rule, RuleSet

NO_BANK = -1
HEALTHY_POSITIVE = frozenset({"norm", "rms", "calls", "total_norm"})
ONE_RANK = "needs several ranks, all of them watching and with the same parameters (DDP, FSDP2)"


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """Series that learn the same way, stacked so that one pass serves the rules of all of them.

    `detector` is that of the rule with the lowest threshold: what cannot breach it breaches none of them.
    `key` names what is learned and how often; `segments` are stacked in order, `parts` their slices of K. Samples
    come at multiples of `judged_every`, of all series or of some.
    """

    key: str
    detector: Detector
    judged_every: int
    segments: tuple[Series, ...]
    parts: tuple[slice, ...]
    size: int

    @property
    def columns(self) -> frozenset[str]:
        """The columns that its segments are about."""
        return frozenset(segment.column for segment in self.segments)

    def sample(self, reader: Reader) -> Sample | None:
        """The samples of all segments; None if none of them was measured at this step."""
        if len(self.segments) == 1:
            return reader.sample(self.segments[0], self.detector.columns)
        samples = [reader.sample(segment) for segment in self.segments]
        if all(sample is None for sample in samples):
            return None
        values, present = [], []
        for segment, sample in zip(self.segments, samples, strict=True):
            values.append(np.zeros(len(segment), np.float32) if sample is None else _narrow(sample.values))
            present.append(np.zeros(len(segment), np.bool_) if sample is None else sample.present)
        return Sample(np.concatenate(values), np.concatenate(present))


def _narrow(values: FloatArray) -> FloatArray:
    """As float32, since one float64 would widen the stack; but for finite values beyond its range."""
    if values.dtype == np.float32:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return values if (np.isinf(narrow) & np.isfinite(values)).any() else narrow


class Yardstick(NamedTuple):
    """A detector by which a rule judges its series, the number of the bank that it learns in, and its part there."""

    detector: Detector
    bank: int
    part: slice


@dataclass(frozen=True, slots=True, eq=False)
class RulePlan:
    """One bound rule: the series it judges (`shown` is how Events name them), and its share of a bank.

    `bank` is the number of its bank and `part` its slice there; NO_BANK for a kind that learns nothing. `second` is its
    second yardstick, if it has one: a series that breaches by either of them breaches.
    """

    rule: Rule
    detector: Detector
    series: Series
    shown: Series
    judged_every: int  # as the rule's own, which has to be worked out
    bank: int = NO_BANK
    part: slice = field(default_factory=lambda: slice(None))
    second: Yardstick | None = None

    @property
    def yardsticks(self) -> tuple[Yardstick, ...]:
        """Every detector that learns for this rule."""
        if self.bank == NO_BANK:
            return ()
        first = Yardstick(self.detector, self.bank, self.part)
        return (first,) if self.second is None else (first, self.second)

    @property
    def rare(self) -> bool:
        """True if some steps do not evaluate it: because of its `every`, or because its column is not always read."""
        return self.judged_every != 1 or not self.series.always

    def action(self, name: str) -> Action | None:
        """The action of that name in its `do:`, if it has one."""
        return next((action for action in self.rule.do if action.name == name), None)

    @property
    def skip(self) -> Action | None:
        """The `skip_step` of its `do:`, if it has one."""
        return self.action("skip_step")

    @property
    def max_consecutive(self) -> int | None:
        """Number of steps in a row that it may skip; None = no limit, or the rule never skips."""
        limit = None if self.skip is None else self.skip.params.get("max_consecutive")
        return None if limit is None else int(limit)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All rules bound to `sites`, and the policies of `clip:`; `inactive` says why a rule is not in `rules`."""

    sites: Sites
    rules: tuple[RulePlan, ...]
    banks: tuple[Bank, ...]
    inactive: Mapping[str, str]
    needs: Needs
    staggering: Staggering
    roots: FloatArray
    clipping: Clipping = NO_CLIPPING
    inhibitors: tuple[tuple[int, ...], ...] = ()
    """By rule: the numbers of the rules that inhibit it, which all come before it."""
    suspended_by: tuple[tuple[int, ...], ...] = ()
    """By rule: the numbers of the rules while which it judges nothing (`unless`), which all come before it."""
    may_be_done: tuple[bool, ...] = ()
    """By bank: whether there can be nothing left for it to learn of healthy steps."""
    conditions: tuple[BoundCondition, ...] = ()
    """Of the rules with `when:`, in the order in which they are evaluated."""
    stages: tuple[Stage, ...] = (WHOLE_RUN,)

    @property
    def suspending(self) -> frozenset[int]:
        """The numbers of the rules that suspend others."""
        return frozenset[int]().union(*self.suspended_by)

    def suspended_while(self, firing: AbstractSet[int]) -> frozenset[int]:
        """The numbers of the rules that judge nothing while the rules `firing` fire."""
        return frozenset(
            number for number, others in enumerate(self.suspended_by) if not firing.isdisjoint(others)
        )

    @property
    def joined(self) -> frozenset[int]:
        """The numbers of the rules with a detector on which a condition depends."""
        return frozenset[int]().union(*(one.of for one in self.conditions))

    def done(self, baselines: tuple[State, ...]) -> tuple[bool, ...]:
        """By bank: True if healthy steps on which its columns are positive cannot change its state any more."""
        banks = zip(self.may_be_done, self.banks, baselines, strict=True)
        return tuple(may and bank.detector.done(baseline) for may, bank, baseline in banks)


def make_plan(ruleset: RuleSet, sites: Sites) -> Plan:
    """Bind every enabled rule to `sites`, which carry labels; a rule that matches nothing is `inactive`, no error."""
    inactive, found = dict(ruleset.inactive), []
    staggering = staggering_of(sites)
    for rule in _named_first(rule for rule in ruleset.rules if rule.enabled):
        series = series_of(rule, ruleset, sites, staggering)
        reason = idle_reason(rule, ruleset, series)
        if reason:
            inactive[rule.id] = reason
        else:
            found.append((rule, series))
    unknown = never_known(_conditions(rule for rule, _ in found), {rule.id for rule, _ in found})
    found = [(rule, series) for rule, series in found if rule.id not in unknown]
    inactive |= unknown
    banks = tuple(_banks(found))
    home = {
        (bank.key, segment.key): (number, part)
        for number, bank in enumerate(banks)
        for segment, part in zip(bank.segments, bank.parts, strict=True)
    }

    def yardstick(rule: Rule, detector: Detector, series: Series) -> Yardstick:
        key = _bank_key(rule, detector, series), series.key
        return Yardstick(detector, *home.get(key, (NO_BANK, slice(None))))

    rules = tuple(
        RulePlan(
            rule,
            rule.detect,
            series,
            _shown(rule, series),
            rule.judged_every,
            *yardstick(rule, rule.detect, series)[1:],
            None if rule.detect.second is None else yardstick(rule, rule.detect.second, series),
        )
        for rule, series in found
    )
    needs = replace(needs_of([rule for rule, _ in found]), about=_about(found, len(sites)))
    clipping = bind_clipping(ruleset, sites)
    known = MappingProxyType(inactive), needs, staggering, roots_of(sites), clipping
    numbers = {one.rule.id: number for number, one in enumerate(rules)}
    conditions = tuple(conditions_of(_conditions(rule for rule, _ in found), numbers))
    inhibitors = _numbers(rules, lambda rule: rule.inhibited_by)
    suspended_by = _numbers(rules, lambda rule: () if rule.do else rule.unless)
    may_be_done = tuple(map(_may_be_done, banks))
    stages = stages_of([one.rule.from_step for one in rules])
    return Plan(sites, rules, banks, *known, inhibitors, suspended_by, may_be_done, conditions, stages)


def _conditions(rules: Iterable[Rule]) -> dict[str, When]:
    return {rule.id: rule.detect for rule in rules if isinstance(rule.detect, When)}


def _named_first(rules: Iterable[Rule]) -> list[Rule]:
    """Rules by id, but each after those that inhibit or suspend it: whether these fire must be known first."""
    ordered: dict[str, Rule] = {}
    left = sorted(rules, key=lambda rule: rule.id)
    while left:
        waiting = {rule.id for rule in left}
        ready = [
            rule for rule in left if waiting.isdisjoint((*rule.inhibited_by, *rule.unless))
        ] or left  # a circle is refused before
        ordered |= {rule.id: rule for rule in ready}
        left = [rule for rule in left if rule.id not in ordered]
    return list(ordered.values())


def _numbers(
    rules: Sequence[RulePlan], named_by: Callable[[Rule], tuple[str, ...]]
) -> tuple[tuple[int, ...], ...]:
    """By rule, the numbers of those that it names and that judge something here."""
    numbers = {one.rule.id: number for number, one in enumerate(rules)}
    return tuple(tuple(numbers[other] for other in named_by(one.rule) if other in numbers) for one in rules)


def _may_be_done(bank: Bank) -> bool:
    """True if the detector of a bank may have seen enough: of what is positive on healthy steps, or of anything."""
    may_be = type(bank.detector).done is not Detector.done
    return may_be and (bank.detector.finishes or HEALTHY_POSITIVE.issuperset(bank.columns))


def _about(found: Iterable[tuple[Rule, Series]], size: int) -> dict[str, BoolArray]:
    """bool[S] by column that is not free: the sites that some rule judges by it."""
    about: dict[str, BoolArray] = {}
    for rule, series in found:
        for column in rule.detect.columns:
            if not is_free(column):
                sites = about.setdefault(column, np.zeros(size, np.bool_))
                sites[slice(None) if series.index is None else series.index] = True
    return about


def staggering_of(sites: Sites) -> Staggering:
    """The phases of the sites: of parameters by their elements, of modules in turn."""
    params = np.array([kind == "param" for kind in sites.kinds], np.bool_)
    return Staggering(np.where(params, np.maximum(sites.numels, 1), 0))


def idle_reason(rule: Rule, ruleset: RuleSet, series: Series) -> str:
    """The reason why a rule can judge nothing among these sites; "" if it can."""
    if series.column in MODULE_COLUMNS and ruleset.modules is None:
        return f"{series.column} needs module taps: add `modules: {{tap: output}}` to the rule file"
    if series.column in RANK_COLUMNS and len(series) == 0:
        return ONE_RANK
    if len(series) == 0:
        what = "parameter" if series.column not in MODULE_COLUMNS else "module"
        return f"matches no {what}" + (f" of groups: {', '.join(rule.groups)}" if rule.groups else "")
    if rule.detect.in_depth_order and len(series) < 2 * rule.detect.ends:
        return f"needs at least {2 * rule.detect.ends} matrices, found {len(series)}"
    return ""


def _shown(rule: Rule, series: Series) -> Series:
    """As Events name it: a rule over all depths is named after the first of its sites."""
    if not rule.detect.in_depth_order:
        return series
    return replace(
        series, scope="total", names=series.names[:1], depths=series.depths[:1], index=None, owners=None
    )


def _learns(detector: Detector) -> bool:
    return len(detector.init(1)) > 0


def _bank_key(rule: Rule, detector: Detector, series: Series) -> str:
    """Yardsticks with equal keys share a bank; a kind that compares series with each other shares only its own."""
    kind, *learned = detector.baseline_key()
    key = f"{kind}({','.join(map(str, learned))})"
    key = key if rule.every == 1 else f"{key}/every={rule.every}"
    key = f"{key}/staggered" if rule.staggered else key
    return key if detector.elementwise else f"{key}/{series.key}"


def _banks(found: list[tuple[Rule, Series]]) -> Iterator[Bank]:
    learning = [
        (_bank_key(rule, detector, series), series, rule, detector)
        for rule, series in found
        for detector in (rule.detect, rule.detect.second)
        if detector is not None and _learns(detector)
    ]
    learning.sort(key=lambda item: (item[0], item[1].key))
    for key, items in groupby(learning, key=lambda item: item[0]):
        members = list(items)
        segments = {series.key: series for _, series, _, _ in members}
        ends = np.cumsum([0, *(len(series) for series in segments.values())]).tolist()
        parts = tuple(slice(start, stop) for start, stop in pairwise(ends))
        _, _, rule, detector = min(members, key=lambda member: float(member[3].fires_at))
        yield Bank(key, detector, rule.judged_every, tuple(segments.values()), parts, ends[-1])
