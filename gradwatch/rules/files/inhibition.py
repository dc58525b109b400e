"""`inhibited_by:` names rules of the file, and no rule by way of others itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwatch.rules.yaml.nodes import Map, Problems, Scalar, Seq, quoted

KEY = "inhibited_by"


def check_inhibition(rules: Map, problems: Problems) -> None:
    """Report ids that are none of a rule, and circles."""
    named = {rule_id: _named(entry.node) for rule_id, entry in rules.entries.items()}
    for rule_id, items in named.items():
        for item in items:
            if item.text not in named:
                meant = problems.meant(item.text, [*named])
                problems.add(
                    item.mark, "GW218", f"unknown rule {quoted(item.text)}{meant}", "name a rule of this file"
                )
            elif rule_id in _reached(item.text, named):
                message = f"{quoted(rule_id)} and {quoted(item.text)} would inhibit each other"
                problems.add(item.mark, "GW218", message, "only the milder one is inhibited by the other")


def _named(rule: object) -> Sequence[Scalar]:
    listed = rule.get(KEY) if isinstance(rule, Map) else None
    items = listed.items if isinstance(listed, Seq) else ()
    return [item for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]


def _reached(rule_id: str, named: Mapping[str, Sequence[Scalar]]) -> set[str]:
    """The rule, and all that inhibit it, by way of others too."""
    found: set[str] = set()
    left = [rule_id]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [item.text for item in named.get(one, ())]
    return found
