"""The data that rules bound to a capture need: which columns, at which steps, and why some of them never come."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType

from gradwatch.account.never_judged import StaggeredSeries
from gradwatch.account.rules_without_data import (
    INSIDE_BACKWARD,
    NO_OPTIMIZER,
    NO_OUTPUT,
    NOT_COMPARED,
    NOT_LOOKED_AT,
    NOT_READ,
    SHARDED,
    SHARDED_GRADIENTS,
    Reads,
    of_condition,
)
from gradwatch.capture.columns import column_reader
from gradwatch.distributed.sharded_norms import REDUCED_COLUMNS
from gradwatch.engine import BoundEngine, Engine
from gradwatch.engine.columns_needed import first_step
from gradwatch.engine.conditions.bound_condition import BoundCondition
from gradwatch.engine.judged_steps.staggered_judging import InTurn, Turns
from gradwatch.engine.rule_plan import RulePlan
from gradwatch.engine.snapshot_reader import Reader
from gradwatch.records.columns import (
    ALWAYS,
    OF_THE_LOOP,
    OTHER_RULES,
    RANK_COLUMNS,
    SCALED_BY,
    is_observed,
    is_scalar,
)
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.rule_set import HistogramOf
from gradwatch.session.optimizer_context import OptimizerContext

NEVER_POSITIVE = (
    "{} was not positive at any step of the rule, and `{}` takes logarithms; `loss_spike` does not"
)
NOTHING_UNREAD: Mapping[str, str] = MappingProxyType({})
HISTOGRAMS = "histograms:{}"
"""Stands among the rules for what that section of the rule file asks for; no rule has such a name."""
OF_PARTS = "a histogram is of a whole gradient, and ranks hold parts of these, or different ones"
NONE_CAME: Mapping[HistogramOf, str] = {
    "gradients": "no parameter's turn has come, or the loss scale in the gradients is no power of two",
    "activations": f"no module's turn has come, or {NO_OUTPUT}",
}
NOTHING_CHOSEN: Mapping[HistogramOf, str] = {
    "gradients": "`histograms: params:` matches no parameter",
    "activations": "`histograms: modules:` matches no tapped module",
}
_WITH_PENDING_GRADIENTS = tuple(name for name in OF_THE_LOOP if name != SCALED_BY)
"""Columns of the loop that come of what happens to gradients between the backward and the step."""
KIND: Mapping[HistogramOf, str] = {"gradients": "param", "activations": "module"}
"""The kind of the sites that histograms are of."""


def unread_columns(ctx: OptimizerContext) -> dict[str, str]:
    """The columns of whole tensors, and of the loop, that are not read here, with the reason."""
    layout, captured = None if ctx.membership is None else ctx.membership.layout, ctx.captured
    if captured.inside_backward or captured.without_optimizer:
        why = INSIDE_BACKWARD if captured.inside_backward else NO_OPTIMIZER
        return {
            **dict.fromkeys(column_reader.COLUMNS, NOT_READ.format(why)),
            **dict.fromkeys(OF_THE_LOOP, NOT_LOOKED_AT.format(why)),
        }
    unread = dict.fromkeys(_WITH_PENDING_GRADIENTS, SHARDED_GRADIENTS) if captured.distributed else {}
    if layout is not None and layout.pooled:
        unread |= {name: SHARDED.format(name) for name in column_reader.COLUMNS.difference(REDUCED_COLUMNS)}
    return unread


def of_ranks(engine: Engine) -> dict[str, Reads]:
    """The rules that compare ranks, which have nothing to read in a loop without an optimizer."""
    rules = (rule for rule in engine.ruleset.rules if rule.enabled)
    return {
        rule.id: Reads(rule.detect.columns[0], why=NOT_COMPARED)
        for rule in rules
        if RANK_COLUMNS.intersection(rule.detect.columns)
    }


def of_histograms(of: HistogramOf, why: str) -> dict[str, Reads]:
    """Histograms of the rule file as an entry among the rules: without data until one came, or for this reason."""
    name = HISTOGRAMS.format(of)

    def has_value(snapshot: Snapshot, in_turn: InTurn) -> bool:
        return any(snapshot.sites.kinds[site] == KIND[of] for site in snapshot.histograms)

    return {name: Reads(name, always=True, why=why, has_value=has_value, valueless=NONE_CAME[of])}


def reads_of(bound: BoundEngine, unread: Mapping[str, str] = NOTHING_UNREAD) -> dict[str, Reads]:
    """Columns that each rule bound to a capture reads, and at which steps, by rule.

    `unread` are reasons by column why it is not read here.
    """
    joined = {bound.plan.rules[one.number].rule.id: _of_rules(bound, one) for one in bound.plan.conditions}
    return joined | {
        one.rule.id: Reads(
            one.series.column,
            one.rule.every,
            one.series.column in ALWAYS and one.series.column not in unread,
            one.detector.finiteness,
            unread.get(one.series.column, ""),
            due=functools.partial(_due, one, bound.turns),
            has_value=functools.partial(_has_value, one),
            valueless=NEVER_POSITIVE.format(one.series.column, one.rule.kind) if _positive_only(one) else "",
            from_step=one.rule.from_step,
        )
        for one in bound.plan.rules
        if one.rule.id not in joined
    }


def _of_rules(bound: BoundEngine, condition: BoundCondition) -> Reads:
    """Reads of a rule with a condition: it has data where all rules have that it is about."""
    rules = bound.plan.rules
    missing = [rule for rule in condition.condition.rules() if rule not in condition.named]
    return Reads(
        OTHER_RULES,
        joined=tuple(sorted(rules[number].rule.id for number in condition.of)),
        why=of_condition(missing, bound.inactive) if missing else "",
        from_step=rules[condition.number].rule.from_step,
    )


def staggered(bound: BoundEngine, unread: Mapping[str, str] = NOTHING_UNREAD) -> dict[str, StaggeredSeries]:
    """The series of parameters, by key, of which each is judged at a step of its own; without what is never read."""
    found: dict[str, StaggeredSeries] = {}
    for one in bound.plan.rules:
        series = one.series
        if one.rule.staggered and len(series) and series.column not in unread and _of_params(bound, one):
            before = found[series.key].rules if series.key in found else ()
            names = StaggeredSeries(series.column, series.every, series.names, (*before, one.rule.id))
            found[series.key] = names
    return found


def _of_params(bound: BoundEngine, one: RulePlan) -> bool:
    """True of sites that are parameters, which those of one series are all or none."""
    first = 0 if one.series.index is None else int(one.series.index[0])
    return bound.sites.kinds[first] == "param"


def _due(one: RulePlan, turns: Turns, step: int) -> bool:
    """True if a rule judges anything at a step, whatever was missed before."""
    if one.rule.staggered:
        return one.series.key in turns.in_turn(step)
    return step % one.rule.every == 0 and step >= first_step(one.series.column)


def _has_value(one: RulePlan, snapshot: Snapshot, in_turn: InTurn) -> bool | None:
    """True if a rule judged a value on a Snapshot, False if what it judged had none, None if it judged nothing."""
    if one.series.key not in in_turn if one.rule.staggered else snapshot.step % one.rule.every:
        return None
    if one.series.column in ALWAYS and is_scalar(one.series.column):
        return True
    sample = Reader(snapshot, in_turn).sample(one.series)
    if sample is None or not sample.present.any():
        return False
    return not _positive_only(one) or bool(0 < sample.values[0] < math.inf)


def _positive_only(one: RulePlan) -> bool:
    """True if a rule on the loss, or on an observed value, judges only what has a logarithm."""
    return (one.series.column == "loss" or is_observed(one.series.column)) and one.detector.takes_logs
