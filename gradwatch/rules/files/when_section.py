"""`when:` -> the condition of a rule on others: its shape, the rules it names, and where it goes in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gradwatch.rules.condition import JOINS, Condition, Join, When, circle
from gradwatch.rules.files.key_validation import check, keys_of
from gradwatch.rules.files.pydantic_models import ConditionEntry
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Seq
from gradwatch.rules.yaml.problems import Problems, quoted, shown

FORM = "all: […], any: […] or not: …, of ids of rules or further such maps"


def when_section(node: Map, at: Mark, where: str, problems: Problems) -> When | None:
    """The condition of a rule, or None after reporting what is wrong with it; which rules there are is not asked."""
    condition = _joined(node, at, f"`when` of {where}", 1, problems)
    return None if condition is None else When(condition)


def named(node: Map) -> Iterator[Scalar]:
    """The places at which rules are named in a condition."""
    for key in JOINS:
        part = node.get(key)
        for each in part.items if isinstance(part, Seq) else (part,):
            if isinstance(each, Map):
                yield from named(each)
            elif isinstance(each, Scalar) and isinstance(each.value, str):
                yield each


def check_circle(rule: str, node: Map, conditions: Mapping[str, Condition], problems: Problems) -> None:
    """Report a condition that leads back to its own rule, at the first id of that way."""
    way = circle(conditions, rule) if rule in conditions else ()
    if not way:
        return
    mark = next((one.mark for one in named(node) if one.text == way[1]), node.mark)
    through = f" through {', '.join(map(quoted, way[1:-1]))}" if len(way) > 2 else ""
    message = f"the condition of rule {quoted(rule)} names the rule itself{through}"
    problems.add(mark, "GW217", message, "take one of these ids out of its condition")


def _joined(node: Map, at: Mark, where: str, around: int, problems: Problems) -> Condition | None:
    """The condition of a map, which has exactly one of `all`, `any` and `not`; `around` is the window around it."""
    entry = check(node, ConditionEntry, problems, at, where)
    joins = [key for key in JOINS if key in node.entries]
    if len(joins) != 1:
        _not_one(node, at, where, joins, problems)
        return None
    within = around if entry is None or entry.within is None else entry.within
    join, mark, part = joins[0], node.key_mark(joins[0]), node.entries[joins[0]].node
    if join == "not":
        parts = [_part(part, join, mark, within, problems)]
    elif isinstance(part, Seq):
        parts = [_part(each, join, mark, within, problems) for each in part.items]
    else:
        return None  # reported by the model
    known = tuple(each for each in parts if each is not None)
    complete = entry is not None and 0 < len(known) == len(parts)
    return Condition(join, parts=known, within=within) if complete else None


def _not_one(node: Map, at: Mark, where: str, joins: list[Join], problems: Problems) -> None:
    """Report a map that has none of the keys that join, or more than one."""
    if joins:
        hint = "put them into one list: all: [{any: […]}, {not: …}]"
        message = f"{where} has more than one of the keys all, any, not"
        problems.add(node.key_mark(joins[1]), "GW208", message, hint)
        return
    misspelt = any(key not in keys_of(ConditionEntry) for key in node.entries)
    if not (misspelt or node.dropped.intersection(JOINS)):
        problems.add(at, "GW102", f"{where} has none of the keys all, any, not", FORM)


def _part(node: Node, join: Join, at: Mark, within: int, problems: Problems) -> Condition | None:
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return Condition("rule", node.text, within=within)
    if isinstance(node, Map):
        return _joined(node, node.mark, f"a part of {quoted(join)}", within, problems)
    mark = node.mark if isinstance(node, Seq) or node.value is not None else at
    message = f"a part of {quoted(join)} must be the id of a rule or a map, not {shown(node)}"
    problems.add(mark, "GW103", message, FORM)
    return None
