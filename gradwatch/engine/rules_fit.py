"""What a rule file may not ask of this model or this version, and which of its rules judge nothing here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gradwatch.engine.backward import misplaced
from gradwatch.engine.clipping import misfits
from gradwatch.engine.plan import idle_reason
from gradwatch.engine.series import MODULE_COLUMNS, group_masks, labels, series_of
from gradwatch.engine.unfit import Refusal, clip_places, refuse
from gradwatch.errors import UnmatchedRulesError
from gradwatch.policies import POLICIES, find_policy
from gradwatch.records.snapshot import RANK_COLUMNS, Sites
from gradwatch.rules.model import NOT_BUILT, Rule, RuleSet

BASELINE_COLUMNS = ("norm", "norm_applied", "norm_local", "rms", "total_norm")
"""Columns of which a baseline is something that a gradient's norm can be brought down to."""


GROUP = "group:"
"""Before the name of a group, where rules and groups that judge nothing are listed: no rule id holds a colon."""


def admit(ruleset: RuleSet, sites: Sites, strict: bool = False) -> None:
    """Raise one `UnfitRulesError` that lists everything the rules ask for that cannot be carried out on these sites.

    A rule or a group that matches nothing is no reason: it is off by itself (`unmatched`). With `strict` it is one,
    as `UnmatchedRulesError`.
    """
    labelled = sites.labelled(labels(ruleset.groups, sites))
    refuse(refusals(ruleset, labelled), ruleset)
    off = unmatched(ruleset, labelled) if strict else {}
    if off:
        listed = "\n".join(f"  - {one}" for one in described(off, ruleset))
        raise UnmatchedRulesError(
            f"the rules do not fit this model, and strict_rules refuses what matches nothing:\n{listed}\n"
            "fix their globs, or silence them with `optional: true`"
        )


def refusals(ruleset: RuleSet, sites: Sites) -> Iterator[Refusal]:
    """Everything that cannot be carried out on these sites, which must carry their labels."""
    yield from _objections(ruleset)
    for place, reason, advice in misfits(ruleset, sites):
        yield Refusal(reason, advice, clip=place)


def objections(ruleset: RuleSet) -> Iterator[tuple[str, str]]:
    """(place, reason) of everything that cannot be carried out whatever the model: a place is "RULE.do" or "clip"."""
    for one in _objections(ruleset):
        if one.rule:
            yield f"{one.rule}.do", f"rule {one.rule!r}: {one.reason}"
        else:
            yield "clip", f"clip.{one.clip}: {one.reason}"


def _objections(ruleset: RuleSet) -> Iterator[Refusal]:
    for rule in ruleset.rules:
        reasons = [*_not_built(rule), *_meaningless(rule), *misplaced(rule, ruleset)] if rule.enabled else []
        if rule.acts and ruleset.modules is None and rule.detect.columns[0] in MODULE_COLUMNS:
            reasons.append(
                f"{rule.detect.columns[0]} is read by module taps only: add `modules: {{tap: output}}`"
            )
        for reason in reasons:
            yield Refusal(reason, rule=rule.id)
    for place, method in clip_places(ruleset.clip).items():
        if find_policy(method) is None:
            yield Refusal(f"no method {method!r}; known: {', '.join(sorted(POLICIES))}", clip=place)


def _not_built(rule: Rule) -> Iterator[str]:
    """What a rule asks for that this version does not have."""
    for action in rule.do:
        name = str(action.params["to"]) if action.name == "escalate" else action.name
        if name in NOT_BUILT:
            yield f"action {name!r} is not built yet; remove it from `do:`, or set `enabled: false`"


def _meaningless(rule: Rule) -> Iterator[str]:
    """Why actions of a rule mean nothing, one sentence each."""
    column, names = rule.detect.columns[0], {action.name for action in rule.do}
    clips = [action for action in rule.do if action.name == "clip"]
    escalates = any(action.name == "escalate" and action.params["to"] == "clip" for action in rule.do)
    touching = names & {"clip", "rescale", "zero_nonfinite"} or ({"clip"} if escalates else set())
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


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))


def may_miss(ruleset: RuleSet) -> bool:
    """Whether `unmatched` could ever list anything: some rule or group is not `optional`."""
    return any(not group.optional for group in ruleset.groups) or any(
        rule.enabled and not rule.optional for rule in ruleset.rules
    )


def unmatched(ruleset: RuleSet, sites: Sites) -> dict[str, str]:
    """Why a rule (by id) or a group (`GROUP` + name) matches nothing of these sites; `optional` ones are left out.

    `sites` must carry their labels. Rules about ranks are left out too: how many ranks there are shows at the first
    step, when the rules are bound.
    """
    masks = group_masks(ruleset.groups, sites)
    empty = {group.name for group in ruleset.groups if not masks[group.name].any()}
    may_be_empty = {group.name for group in ruleset.groups if group.optional}
    found = {GROUP + name: "matches no parameter" for name in sorted(empty - may_be_empty)}
    for rule in ruleset.rules:
        if rule.detect.columns[0] in RANK_COLUMNS:
            continue
        if not rule.enabled or rule.optional or _only_optional(rule, empty & may_be_empty):
            continue
        reason = idle_reason(rule, ruleset, series_of(rule, ruleset, sites))
        if reason:
            found[rule.id] = reason
    return found


def described(off: Mapping[str, str], ruleset: RuleSet) -> list[str]:
    """One clause for each rule and group of `unmatched`, with its place in the file."""
    clauses = []
    for key, reason in off.items():
        what = "group" if key.startswith(GROUP) else "rule"
        clauses.append(f"{what} {key.removeprefix(GROUP)!r} {reason}{_origin(ruleset, key)}")
    return clauses


def _only_optional(rule: Rule, empty: set[str]) -> bool:
    return bool(rule.groups) and empty.issuperset(rule.groups)


def _origin(ruleset: RuleSet, key: str) -> str:
    where = ruleset.origins.get(key, "")
    return f" ({where})" if where and where != "default" else ""
