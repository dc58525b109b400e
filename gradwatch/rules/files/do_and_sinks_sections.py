"""`do:` and `sinks:`: lists of names, or of one-key maps that give a name its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.files import words_of_other_tools
from gradwatch.rules.files.key_validation import check
from gradwatch.rules.files.model_base import parameters_model
from gradwatch.rules.rule_set import Action, SinkSpec
from gradwatch.rules.sink_kinds import SINKS
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Seq, data
from gradwatch.rules.yaml.problems import Problems, quoted, shown

SINK_GROUP = "gradwatch.sinks"


def named_items(node: Node | None, what: str, problems: Problems) -> Iterator[tuple[str, Mark, Map]]:
    """The items of a list of names and one-key maps, as (name, place of the name, parameters)."""
    seen: set[str] = set()
    for item in node.items if isinstance(node, Seq) else ():
        found = _named(item, what, problems)
        if found is None:
            continue
        name, mark, _ = found
        if name in seen and not (name in ACTIONS and ACTIONS[name].repeated):
            problems.add(mark, "GW209", f"{what} {quoted(name)} is there twice", "keep one of them")
        seen.add(name)
        yield found


def _named(item: Node, what: str, problems: Problems) -> tuple[str, Mark, Map] | None:
    if isinstance(item, Scalar) and isinstance(item.value, str):
        return item.text, item.mark, Map(item.mark)
    if isinstance(item, Map) and len(item.entries) == 1:
        name, entry = next(iter(item.entries.items()))
        if isinstance(entry.node, Map):
            return name, entry.key, entry.node
        if isinstance(entry.node, Scalar) and entry.node.value is None:
            return name, entry.key, Map(entry.key)
        problems.add(
            entry.key,
            "GW103",
            f"the parameters of {what} {quoted(name)} must be a map, not {shown(entry.node)}",
        )
        return None
    if isinstance(item, Map):
        if not item.dropped:
            keys = list(item.entries)
            hint = f"parameters are indented below their {what}: {keys[0]}: {{…}}" if keys else ""
            problems.add(item.mark, "GW103", f"one {what} per list item, not {len(keys)} keys", hint)
        return None
    problems.add(item.mark, "GW103", f"{what} must be a name or a map, not {shown(item)}")
    return None


def actions(node: Node | None, problems: Problems) -> tuple[Action, ...]:
    """`do:` resolved; what is wrong is reported and left out."""
    result = []
    for name, mark, params in named_items(node, "action", problems):
        kind = ACTIONS.get(name)
        if kind is None:
            advice = words_of_other_tools.ACTIONS.get(name.lower(), "")
            meant = "" if advice else problems.meant(name, ACTIONS)
            hint = advice or f"actions: {', '.join(ACTIONS)}"
            problems.add(mark, "GW203", f"unknown action {quoted(name)}{meant}", hint)
            continue
        elsewhere = words_of_other_tools.ACTION_KEYS.get(name)
        valid = check(params, parameters_model(kind.params), problems, mark, f"action '{name}'", elsewhere)
        if valid is None:
            continue
        values = valid.model_dump()
        _contradictions(name, values, params, problems)
        result.append(Action(name, values))
    return tuple(result)


def _contradictions(name: str, values: dict[str, Any], params: Map, problems: Problems) -> None:
    """Report parameters that are fine one by one, and together mean nothing."""
    if name == "escalate" and not _possible(values["after"]):
        said = f"{values['after']!r} can never happen"
        problems.add(params.key_mark("after"), "GW208", said, "k must not exceed n")
    wanted = [key for key in ("batch", "parameters") if name == "snapshot" and values[key]]
    if wanted and not values["max_bytes"]:
        said = f"no byte of {' and '.join(wanted)} can be kept in max_bytes: 0"
        problems.add(params.key_mark("max_bytes"), "GW208", said, "allow some, or do not ask for them")


def _possible(after: str) -> bool:
    times, steps = after.split(" in ")
    return int(times) <= int(steps)


def sinks(node: Node | None, problems: Problems) -> tuple[SinkSpec, ...]:
    """`sinks:` resolved; what is wrong is reported and left out."""
    result = []
    for name, mark, options in named_items(node, "sink", problems):
        if name not in SINKS and not entry_points(group=SINK_GROUP, name=name):
            _unknown_sink(name, mark, problems)
            continue
        model = SINKS[name].options if name in SINKS else None
        if model is None:
            result.append(SinkSpec(name, data(options)))
            continue
        advice = words_of_other_tools.sink_keys(name)
        valid = check(options, parameters_model(model), problems, mark, f"sink '{name}'", advice)
        if valid is not None:
            result.append(SinkSpec(name, valid.model_dump(exclude_unset=True)))
    return tuple(result)


def _unknown_sink(name: str, mark: Mark, problems: Problems) -> None:
    known = sorted(SINKS)
    advice = words_of_other_tools.SINKS.get(name.lower(), "")
    meant = "" if advice else problems.meant(name, known)
    hint = advice or f"sinks: {', '.join(known)}"
    problems.add(mark, "GW204", f"unknown sink {quoted(name)}{meant}", hint)
