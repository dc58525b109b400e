"""Objections to a rule file that hold for every model: actions that contradict their rule, or are not built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gradwatch.policies import POLICIES, find_policy
from gradwatch.records.columns import MODULE_COLUMNS, RANK_COLUMNS
from gradwatch.rules.action_kinds import ACTIONS, changing_gradients
from gradwatch.rules.condition import When, rules_below
from gradwatch.rules.rule_set import NOT_BUILT, Action, Clip, Rule, RuleSet

BASELINE_COLUMNS = ("norm", "norm_applied", "norm_local", "rms", "total_norm")
"""Columns of which a baseline is something that a gradient's norm can be brought down to."""
BOUNDED = frozenset({"grad_input_norm"})
"""Module columns that a full-backward hook can bound: it returns the gradient that the module passes on."""
TOTAL = "total"


class ImpossibleAction(NamedTuple):
    """Reason why the actions of `rule`, or the clip at the place `clip` (see `clip_places`), cannot be carried out."""

    reason: str
    rule: str = ""
    clip: str = ""


def impossible_actions(ruleset: RuleSet) -> Iterator[ImpossibleAction]:
    """Everything that cannot be carried out whatever the model; rules that are switched off are not looked at."""
    for rule in ruleset.rules:
        reasons = [*_not_built(rule), *_meaningless(rule), *_misplaced(rule, ruleset)] if rule.enabled else []
        reasons += _between(rule, ruleset) if rule.enabled else ()
        if rule.acts and ruleset.modules is None and rule.detect.columns[0] in MODULE_COLUMNS:
            reasons.append(
                f"{rule.detect.columns[0]} is read by module taps only: add `modules: {{tap: output}}`"
            )
        for reason in reasons:
            yield ImpossibleAction(reason, rule=rule.id)
    for place, method in clip_places(ruleset.clip).items():
        if find_policy(method) is None:
            yield ImpossibleAction(f"no method {method!r}; known: {', '.join(sorted(POLICIES))}", clip=place)


def clip_places(clip: Clip | None) -> Mapping[str, str]:
    """The places of `clip:` ("total", "groups.NAME"), each with its method."""
    if clip is None:
        return {}
    total = {} if clip.total is None else {TOTAL: clip.total.method}
    return {**total, **{f"groups.{name}": said.method for name, said in clip.groups.items()}}


def rules_joined(rule: Rule, ruleset: RuleSet) -> list[Rule]:
    """The rules with a detector that the condition of a rule is about; none where it has no condition."""
    conditions = {one.id: one.detect.condition for one in ruleset.rules if isinstance(one.detect, When)}
    below = rules_below(conditions, rule.id) if rule.id in conditions else ()
    return [one for one in ruleset.rules if one.id in below]


def by_what_acts(ruleset: RuleSet) -> frozenset[str]:
    """The ids of the rules by whose state gradients may be changed: those that act, and what their conditions join."""
    acting = [rule for rule in ruleset.rules if rule.acts]
    return frozenset(one.id for rule in acting for one in (rule, *rules_joined(rule, ruleset)))


def at_backward(action: Action) -> bool:
    """True for a clip that is done inside the backward."""
    return action.name == "clip" and action.params.get("at") == "backward"


def _not_built(rule: Rule) -> Iterator[str]:
    """Actions of a rule that this version does not have."""
    for action in rule.do:
        if action.does in NOT_BUILT:
            yield f"action {action.does!r} is not built yet; remove it from `do:`, or set `enabled: false`"


def _meaningless(rule: Rule) -> Iterator[str]:
    """The reason why actions of a rule mean nothing, one sentence each."""
    column, names = rule.detect.columns[0], {action.name for action in rule.do}
    clips = [action for action in rule.do if action.name == "clip"]
    escalates = any(action.name == "escalate" and action.params["to"] == "clip" for action in rule.do)
    touching = names & changing_gradients() or ({"clip"} if escalates else set())
    local = all(action.params.get("at") == "backward" for action in clips)
    if touching and column in RANK_COLUMNS:
        yield f"{_listed(touching)} cannot act on ranks; skip_step, localise and stop can"
    elif touching and column in MODULE_COLUMNS and not (touching == {"clip"} and local and clips):
        yield f"{_listed(touching)} at the step acts on parameters, and {column} is measured on modules"
    learns = rule.detect.has_baseline and rule.detect.invertible
    to_baseline = any(action.params["to"] == "baseline" for action in clips) or (escalates and not clips)
    if to_baseline and not (learns and column in BASELINE_COLUMNS):
        yield (
            f"clip to the baseline needs one of gradient norms ({', '.join(BASELINE_COLUMNS)}) that `spike` learns; "
            f"this rule has kind {rule.kind} on {column}; clip to a number instead"
        )
    if "zero_nonfinite" in names and not rule.detect.finiteness:
        yield f"zero_nonfinite needs a rule about NaN and Inf; kind {rule.kind} is about finite numbers"


def _between(rule: Rule, ruleset: RuleSet) -> Iterator[str]:
    """Actions of a rule with a condition that steps in between would miss: others are judged at some steps only."""
    protecting = {action.does for action in rule.do if ACTIONS[action.does].every_step}
    for one in rules_joined(rule, ruleset):
        of_ranks = one.detect.columns[0] in RANK_COLUMNS
        named = {action.does for action in rule.do} if of_ranks else protecting
        if named and one.every > 1:
            yield (
                f"{_listed(named)} with a condition on {one.id!r}, which is judged every {one.every} steps: a step in"
                f" between would go unjudged; write `every: 1` in {one.id!r}"
            )


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))


def _misplaced(rule: Rule, ruleset: RuleSet) -> Iterator[str]:
    """Parts of a rule that no hook can carry out in the backward, one sentence each."""
    for action in rule.do:
        if action.name == "drop_micro" and rule.detect.kind != "nonfinite":
            yield "`drop_micro` drops what is not finite, so it needs kind: nonfinite"
        if at_backward(action):
            reason = _cannot(rule, action.params.get("to"), ruleset)
            if reason:
                yield f"`clip: {{at: backward}}` {reason}; use `at: step`"


def _cannot(rule: Rule, to: object, ruleset: RuleSet) -> str:
    detector, column = rule.detect, rule.detect.columns[0]
    if not detector.invertible or detector.comparison != "above":
        return f"needs a detector with a limit known beforehand (above, spike), not {detector.kind!r}"
    if detector.second is not None:
        return "needs a limit known beforehand, which `factor` does not give"
    if rule.for_ != 1:
        return "acts on the first gradient above the limit, so it needs `for: 1`"
    if column in MODULE_COLUMNS:
        return _cannot_on_modules(column, to, ruleset)
    if rule.scope != "param":
        return f"sees one parameter at a time, not scope {rule.scope!r}"
    return ""


def _cannot_on_modules(column: str, to: object, ruleset: RuleSet) -> str:
    if column not in BOUNDED:
        return f"bounds the gradient that a module passes on, `grad_input_norm`, not {column!r}"
    if to == "baseline":
        return "bounds the gradient that a module passes on by a number: write `to: NUMBER`"
    if ruleset.modules is None or ruleset.modules.tap != "full_backward":
        return "on modules needs `modules: {tap: full_backward}`"
    return ""
