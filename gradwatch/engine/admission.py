"""What a rule file may not ask of this model or this version: said before training starts, all at once."""

from __future__ import annotations

from gradwatch.engine.clipping import misfits
from gradwatch.engine.plan import idle_reason
from gradwatch.engine.series import group_masks, labels, series_of
from gradwatch.errors import AttachError
from gradwatch.policies import POLICIES, find_policy
from gradwatch.rules import NOT_BUILT, Clip, Rule, RuleSet
from gradwatch.snapshot import RANK_COLUMNS, Sites


def admit(ruleset: RuleSet, sites: Sites) -> None:
    """Raise one `AttachError` that lists all rules and groups without a match, and all not built yet."""
    labelled = sites.labelled(labels(ruleset.groups, sites))
    problems = [*unbuilt(ruleset), *_unmatched(ruleset, labelled)]
    if ruleset.clip is not None and not _unbuilt_clip(ruleset.clip):
        problems += misfits(ruleset, labelled)
    if problems:
        raise AttachError("the rules do not fit this model:\n" + "\n".join(f"  - {one}" for one in problems))


def unbuilt(ruleset: RuleSet) -> list[str]:
    """What the rules ask for that this version does not have, one sentence each; needs no model."""
    problems = []
    for rule in ruleset.rules:
        for action in rule.do if rule.enabled else ():
            if action.name in NOT_BUILT:
                problems.append(
                    f"rule {rule.id!r}: action {action.name!r} is not built yet; "
                    f"remove it from `do:`, or set `enabled: false`{_origin(ruleset, rule.id + '.do')}"
                )
    return problems + ([] if ruleset.clip is None else _unbuilt_clip(ruleset.clip))


def _unbuilt_clip(clip: Clip) -> list[str]:
    """The methods that nobody provides, and `at: backward`."""
    said = {**({} if clip.total is None else {"total": clip.total}), **clip.groups}
    problems = [
        f"clip.{place if place == 'total' else 'groups.' + place}: no method {one.method!r}; known: {_known()}"
        for place, one in said.items()
        if find_policy(one.method) is None
    ]
    if clip.at != "step":
        problems.append(f"clip.at: {clip.at!r} is not built yet; use `at: step`")
    return problems


def _known() -> str:
    return ", ".join(sorted(POLICIES))


def _unmatched(ruleset: RuleSet, sites: Sites) -> list[str]:
    masks = group_masks(ruleset.groups, sites)
    empty = {group.name for group in ruleset.groups if not masks[group.name].any()}
    may_be_empty = {group.name for group in ruleset.groups if group.optional}
    problems = [
        f"group {name!r} matches no parameter; fix its globs, or set `optional: true`"
        for name in sorted(empty - may_be_empty)
    ]
    for rule in ruleset.rules:
        if rule.detect.columns[0] in RANK_COLUMNS:
            continue  # how many ranks there are shows at the first step; with one the rule is inactive
        if not rule.enabled or rule.optional or _only_optional(rule, empty & may_be_empty):
            continue
        reason = idle_reason(rule, ruleset, series_of(rule, ruleset, sites))
        if reason:
            advice = f"{reason}; fix it, or set `optional: true`{_origin(ruleset, rule.id)}"
            problems.append(f"rule {rule.id!r} {advice}")
    return problems


def _only_optional(rule: Rule, empty: set[str]) -> bool:
    return bool(rule.groups) and empty.issuperset(rule.groups)


def _origin(ruleset: RuleSet, key: str) -> str:
    where = ruleset.origins.get(key, "")
    return f" ({where})" if where and where != "default" else ""
