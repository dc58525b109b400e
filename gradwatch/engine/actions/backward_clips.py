"""Actions of a rule file inside the backward, through the return value of hooks.

Axes: S sites (parameters, then modules), K series of one rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.baseline_bounds import bounds_of_rules, own_state
from gradwatch.engine.engine_state import EngineState
from gradwatch.engine.rule_plan import Plan, RulePlan
from gradwatch.policies import ElementwisePolicy
from gradwatch.policies.norm_bound import Bound
from gradwatch.records.columns import MODULE_COLUMNS
from gradwatch.records.snapshot import BoolArray
from gradwatch.rules.impossible_actions import BOUNDED, at_backward
from gradwatch.rules.rule_set import Action, RuleSet


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Actions that may be done inside the backward.

    `covered` bool[S] are the sites that may be clipped by a factor made of their norm; `elementwise` are the policies
    on elements, each with the bool[S] of its sites.
    """

    covered: BoolArray
    elementwise: tuple[tuple[ElementwisePolicy, BoolArray], ...]

    def __bool__(self) -> bool:
        return bool(self.covered.any()) or bool(self.elementwise)


def clips_in_backward(ruleset: RuleSet) -> list[tuple[str, bool]]:
    """(rule id, True if it has `local: true`) for every rule that clips inside the backward."""
    return [
        (rule.id, bool(action.params.get("local")))
        for rule in ruleset.rules
        for action in rule.do
        if rule.acts and at_backward(action)
    ]


def asks_backward(ruleset: RuleSet) -> list[tuple[str, bool]]:
    """(what, True if it has `local: true`) for everything in a rule file that acts inside the backward."""
    found = [(f"rule {rule!r}", local) for rule, local in clips_in_backward(ruleset)]
    if ruleset.clip is not None and ruleset.clip.at == "backward":
        found.append(("`clip`", ruleset.clip.local))
    return found


def drop_micro_rules(ruleset: RuleSet) -> list[str]:
    """The ids of the rules with `drop_micro`: a micro-batch whose gradients are not finite is left out."""
    drops = (rule for rule in ruleset.rules if rule.acts)
    return [rule.id for rule in drops if any(action.name == "drop_micro" for action in rule.do)]


def drops_micro_from(ruleset: RuleSet) -> int:
    """The first step at which some rule drops micro-batches; some rule does."""
    return min(ruleset.rule(rule).from_step for rule in drop_micro_rules(ruleset))


def drops_micro(ruleset: RuleSet) -> bool:
    """True if some rule has `drop_micro`."""
    return bool(drop_micro_rules(ruleset))


def only_in_backward(ruleset: RuleSet, rule_id: str) -> bool:
    """True if a rule does everything inside the backward, so that its step need not wait for a verdict."""
    return all(map(at_backward, ruleset.rule(rule_id).do))


def at_step(ruleset: RuleSet) -> RuleSet:
    """The rule file with every clip of parameters done at the step instead of in the backward.

    What bounds the gradient between modules stays where it is: at the step it would be too late.
    """
    rules = tuple(
        rule
        if rule.detect.columns[0] in MODULE_COLUMNS
        else replace(rule, do=tuple(map(_moved_to_step, rule.do)))
        for rule in ruleset.rules
    )
    clip = None if ruleset.clip is None else replace(ruleset.clip, at="step")
    return replace(ruleset, rules=rules, clip=clip)


def _moved_to_step(action: Action) -> Action:
    return replace(action, params={**action.params, "at": "step"}) if at_backward(action) else action


def asked(plan: Plan) -> Asked:
    """Sites at which something may be done in the backward, whatever the present bounds are."""
    covered = np.zeros(len(plan.sites), np.bool_)
    for one in plan.rules:
        if _clips_in_backward(one) and one.series.column not in MODULE_COLUMNS:
            covered[_index(one, plan)] = True
    policies = plan.clipping.policies if plan.clipping.at == "backward" else ()
    for policy in policies:
        covered[policy.index] = True
    return Asked(covered, plan.clipping.elementwise if plan.clipping.at == "backward" else ())


def asks_of_modules(ruleset: RuleSet) -> bool:
    """True if some rule bounds the gradient between modules."""
    return any(
        rule.acts and rule.detect.columns[0] in BOUNDED and at_backward(action)
        for rule in ruleset.rules
        for action in rule.do
    )


def bounds(plan: Plan, state: EngineState, step: int) -> tuple[Bound, ...]:
    """The bounds on the parameters' gradients for the next backward, which belongs to this step or a later one."""
    found = bounds_of_rules(plan, state, step)
    if plan.clipping.at == "backward" and step >= plan.clipping.from_step:
        for policy, known in zip(plan.clipping.policies, state.clips, strict=True):
            bound = policy.policy.bound(known, policy.roots)
            found.append(_spread(bound, policy.index, len(plan.sites)))
    return tuple(found)


def module_bounds(plan: Plan, state: EngineState, step: int) -> tuple[Bound, ...]:
    """The bounds on what M modules pass on in the next backward, of this step or a later one, in their order."""
    modules = np.flatnonzero(np.array([kind == "module" for kind in plan.sites.kinds], np.bool_))
    return tuple(
        _of_module(one, state, plan).at(modules)
        for one in plan.rules
        if _clips_in_backward(one) and one.series.column in BOUNDED and step >= one.rule.from_step
    )


def _clips_in_backward(one: RulePlan) -> bool:
    return one.rule.acts and any(map(at_backward, one.rule.do))


def _index(one: RulePlan, plan: Plan) -> NDArray[np.intp]:
    return np.arange(len(plan.sites)) if one.series.index is None else one.series.index


def _of_module(one: RulePlan, state: EngineState, plan: Plan) -> Bound:
    trigger = one.detector.limit(own_state(one, state.baselines))
    action = one.action("clip")
    assert trigger is not None
    assert action is not None
    high = np.broadcast_to(np.asarray(trigger, np.float64), (len(one.series),))
    target = np.full(len(high), float(action.params["to"]))
    return _spread(Bound(np.full(len(high), -np.inf), high, target), _index(one, plan), len(plan.sites))


def _spread(bound: Bound, index: NDArray[np.intp], size: int) -> Bound:
    """A bound on the sites of `index`; the others are left alone."""
    low, high, target = np.full(size, -np.inf), np.full(size, np.inf), np.full(size, np.inf)
    low[index], high[index], target[index] = bound.low, bound.high, bound.target
    return bound._replace(low=low, high=high, target=target)
