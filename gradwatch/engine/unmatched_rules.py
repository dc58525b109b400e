"""Checks of a rule file against a model, and the rules and groups that match nothing there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gradwatch.engine.clipping.bind_clip_section import clip_groups_without_any, misfits
from gradwatch.engine.conditions.bind_conditions import never_known
from gradwatch.engine.rule_plan import idle_reason, staggering_of
from gradwatch.engine.selected_parameters import group_masks, labels
from gradwatch.engine.series import series_of
from gradwatch.engine.unsupported_rules import Refusal, refuse
from gradwatch.errors import UnmatchedRulesError
from gradwatch.records.columns import RANK_COLUMNS
from gradwatch.records.snapshot import Sites
from gradwatch.rules.condition import When
from gradwatch.rules.impossible_actions import impossible_actions
from gradwatch.rules.rule_set import Rule, RuleSet

GROUP = "group:"
"""Before the name of a group, where rules and groups that judge nothing are listed: no rule id holds a colon."""
CLIPS_NOTHING = "has no parameter for `clip:`: the groups before it that are named there have them all"


def admit(ruleset: RuleSet, sites: Sites, strict: bool = False) -> None:
    """Raise one `UnfitRulesError` that lists everything that cannot be carried out on these sites, if there is any.

    A rule or group that matches nothing is no error: it is off by itself (`unmatched`). With `strict` it is one, and
    raises `UnmatchedRulesError`.
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
    for one in impossible_actions(ruleset):
        yield Refusal(one.reason, rule=one.rule, clip=one.clip)
    for place, reason, advice in misfits(ruleset, sites):
        yield Refusal(reason, advice, clip=place)


def may_miss(ruleset: RuleSet) -> bool:
    """True if `unmatched` can list anything: some rule or group is not optional, or several are clipped."""
    if ruleset.clip is not None and len(ruleset.clip.groups) > 1:
        return True
    return any(not group.optional for group in ruleset.groups) or any(
        rule.enabled and not rule.optional for rule in ruleset.rules
    )


def unmatched(ruleset: RuleSet, sites: Sites) -> dict[str, str]:
    """By rule id or group (`GROUP` + name), the reason why it matches no site; `optional` ones are left out.

    `sites` must carry their labels. Rules about ranks are left out too: the number of ranks is known at the first step,
    when the rules are bound.
    """
    masks = group_masks(ruleset.groups, sites)
    empty = {group.name for group in ruleset.groups if not masks[group.name].any()}
    may_be_empty = {group.name for group in ruleset.groups if group.optional}
    found = {GROUP + name: "matches no parameter" for name in sorted(empty - may_be_empty)}
    found |= {
        GROUP + name: CLIPS_NOTHING for name in clip_groups_without_any(ruleset, sites) if name not in empty
    }
    staggering = staggering_of(sites)
    idle = {
        rule.id: idle_reason(rule, ruleset, series_of(rule, ruleset, sites, staggering))
        for rule in ruleset.rules
        if rule.enabled and rule.detect.columns[0] not in RANK_COLUMNS
    }
    of_ranks = {rule.id for rule in ruleset.rules if rule.detect.columns[0] in RANK_COLUMNS}
    bound = of_ranks.union(rule for rule, reason in idle.items() if not reason)
    conditions = {rule.id: rule.detect for rule in ruleset.rules if isinstance(rule.detect, When)}
    idle |= never_known({rule: when for rule, when in conditions.items() if rule in idle}, bound)
    for rule in ruleset.rules:
        if idle.get(rule.id) and not (rule.optional or _only_optional(rule, empty & may_be_empty)):
            found[rule.id] = idle[rule.id]
    return found


def described(off: Mapping[str, str], ruleset: RuleSet) -> list[str]:
    """One clause for each rule and group of `unmatched`, with its position in the file."""
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
