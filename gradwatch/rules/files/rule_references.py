"""`inhibited_by:` and `unless:` name rules of the file, and no rule by way of others itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwatch.rules.yaml.nodes import Map, Scalar, Seq
from gradwatch.rules.yaml.problems import Problems, quoted

INHIBITED, UNLESS = "inhibited_by", "unless"
KEYS = {INHIBITED: "GW218", UNLESS: "GW219"}
CIRCLES = {
    INHIBITED: ("would inhibit each other", "only the milder one is inhibited by the other"),
    UNLESS: ("would wait for each other", "take one of the two out"),
}


def check_named_rules(rules: Map, problems: Problems) -> None:
    """Report ids that are none of a rule, or of one that is judged too late, and circles."""
    named = {
        rule_id: {key: _named(entry.node, key) for key in KEYS} for rule_id, entry in rules.entries.items()
    }
    for rule_id, by_key in named.items():
        for key, items in by_key.items():
            for item in items:
                _check(rule_id, key, item, rules, named, problems)


def _check(
    rule_id: str,
    key: str,
    item: Scalar,
    rules: Map,
    named: Mapping[str, Mapping[str, Sequence[Scalar]]],
    problems: Problems,
) -> None:
    if item.text not in named:
        meant = problems.meant(item.text, [*named])
        message = f"unknown rule {quoted(item.text)}{meant}"
        problems.add(item.mark, KEYS[key], message, "name a rule of this file")
    elif rule_id in _reached(item.text, named):
        what, hint = CIRCLES[key]
        problems.add(item.mark, KEYS[key], f"{quoted(rule_id)} and {quoted(item.text)} {what}", hint)
    elif _joins(rules.entries[item.text].node):
        message = f"{quoted(item.text)} has a condition, which is evaluated after {quoted(rule_id)}"
        problems.add(item.mark, KEYS[key], message, "name the rules of its condition")


def _joins(rule: object) -> bool:
    return isinstance(rule, Map) and "when" in rule.entries


def _named(rule: object, key: str) -> Sequence[Scalar]:
    listed = rule.get(key) if isinstance(rule, Map) else None
    items = listed.items if isinstance(listed, Seq) else ()
    return [item for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]


def _reached(rule_id: str, named: Mapping[str, Mapping[str, Sequence[Scalar]]]) -> set[str]:
    """The rule, and all that it names, by way of others too."""
    found: set[str] = set()
    left = [rule_id]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [item.text for items in named.get(one, {}).values() for item in items]
    return found
