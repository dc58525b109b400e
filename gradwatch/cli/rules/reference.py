"""`gradwatch rules kinds | columns | actions | policies | sinks`: the words of a rule file, from what checks them."""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Mapping
from typing import Any

from gradwatch.cli.terminal import complain, paint, table
from gradwatch.runtime.spelling import did_you_mean

HELP = {
    "kinds": "kinds of detectors, for `detect: {kind: …}`",
    "columns": "what is measured, for `of:`",
    "actions": "what a rule may do, for `do:`",
    "policies": "clip policies, for `clip: {method: …}`",
    "sinks": "where Records go, for `sinks:`",
}
LONGEST_TYPE = 40
"""Characters; what is longer stands below the table."""
_COLUMN_FIELDS = ("of", "unit", "grouped", "sharded", "reads", "measured")


def add_parsers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the five commands to argparse."""
    for topic, text in HELP.items():
        parser = verbs.add_parser(
            topic, help=text, description=f"List {text}; with a NAME all that is said of one."
        )
        parser.add_argument("name", metavar="NAME", nargs="?", help="one of them; without it, all are listed")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(handler=handle, topic=topic)


def handle(arguments: argparse.Namespace) -> int:
    """Print one topic or one entry; 2 for an entry that does not exist."""
    entries = entries_of(arguments.topic)
    if arguments.name is None:
        if arguments.json:
            print(json.dumps(entries, indent=2))
        else:
            rows = [(name, _first_sentence(entry["does"])) for name, entry in entries.items()]
            print(table((arguments.topic, "what it is"), rows))
        return 0
    entry = entries.get(arguments.name)
    if entry is None:
        hint = did_you_mean(arguments.name, entries)
        complain(
            f"gradwatch: there is no {arguments.name!r}{hint}; `gradwatch rules {arguments.topic}` lists all"
        )
        return 2
    print(json.dumps({arguments.name: entry}, indent=2) if arguments.json else page(arguments.name, entry))
    return 0


def page(name: str, entry: Mapping[str, Any]) -> str:
    """Everything on one entry: what it does, then its keys or facts, one to a line."""
    parts = [f"{paint(name, 'bold')}\n{entry['does']}"]
    if entry.get("keys"):
        long = {key: one["type"] for key, one in entry["keys"].items() if len(one["type"]) > LONGEST_TYPE}
        rows = [
            (
                key,
                "see below" if key in long else one["type"],
                "required" if one["required"] else _shown(one["default"]),
                one["means"],
            )
            for key, one in entry["keys"].items()
        ]
        parts.append(table(("key", "value", "default", "what it is"), rows))
        parts += [
            textwrap.fill(f"{key}: {words}", 100, subsequent_indent="  ") for key, words in long.items()
        ]
    facts = [(key, str(value)) for key, value in entry.items() if key not in ("does", "keys") and value]
    parts += [table((), facts)] if facts else []
    return "\n\n".join(parts)


def entries_of(topic: str) -> dict[str, dict[str, Any]]:
    """Everything of one topic, by name, loaded plug-ins included."""
    return _TOPICS[topic]()


def topic_of(name: str) -> str | None:
    """The first topic that has an entry of this name."""
    return next((topic for topic in _TOPICS if name in entries_of(topic)), None)


def _kinds() -> dict[str, dict[str, Any]]:
    from gradwatch.detectors import DETECTORS
    from gradwatch.rules.files.pydantic_models import detector_model

    return {name: _entry(cls, detector_model(cls)) for name, cls in sorted(DETECTORS.items())}


def _policies() -> dict[str, dict[str, Any]]:
    from gradwatch.policies import POLICIES
    from gradwatch.rules.files.pydantic_models import policy_model

    return {name: _entry(cls, policy_model(cls)) for name, cls in sorted(POLICIES.items())}


def _actions() -> dict[str, dict[str, Any]]:
    from gradwatch.rules.action_kinds import ACTIONS
    from gradwatch.rules.files.model_base import parameters_model

    return {name: _entry(kind.params, parameters_model(kind.params)) for name, kind in ACTIONS.items()}


def _sinks() -> dict[str, dict[str, Any]]:
    from gradwatch.rules.files.model_base import parameters_model
    from gradwatch.rules.sink_kinds import SINKS

    own = {"does": "Of a plug-in: its options are the keywords of its class.", "keys": {}}
    return {
        name: own if kind.options is None else _entry(kind.options, parameters_model(kind.options))
        for name, kind in sorted(SINKS.items())
    }


def _columns() -> dict[str, dict[str, Any]]:
    from gradwatch.records.columns import CATALOGUE

    return {
        column.name: {"does": column.means, **{name: getattr(column, name) for name in _COLUMN_FIELDS}}
        for column in CATALOGUE
    }


def sections() -> dict[str, dict[str, Any]]:
    """Every map of a rule file by where it stands, with its keys and what applies where they are left out."""
    from gradwatch.rules.files import pydantic_models as models
    from gradwatch.rules.files.rule_building import BUILT_IN

    found = {
        "the file": models.Document,
        "defaults:": models.Defaults,
        "groups: NAME:": models.GroupEntry,
        "rules: ID:": models.RuleEntry,
        "when:": models.ConditionEntry,
        "clip:": models.ClipEntry,
        "modules:": models.ModulesEntry,
        "histograms:": models.HistogramsEntry,
        "overrides: - …": models.Override,
        "match:": models.Match,
    }
    entries = {place: _entry(model, model) for place, model in found.items()}
    for place in ("defaults:", "rules: ID:"):
        for key, value in BUILT_IN.items():
            entries[place]["keys"][key]["default"] = value
    return entries


def _entry(cls: type[Any], model: Any) -> dict[str, Any]:
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    keys = {
        name: {
            "type": _type(one, schema.get("$defs", {})),
            "default": one.get("default"),
            "required": name in required,
            "means": one.get("description", ""),
        }
        for name, one in schema.get("properties", {}).items()
    }
    return {"does": inspect.cleandoc(cls.__doc__ or ""), "keys": keys}


def _type(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON Schema type in words: `number > 0`, `nan | inf`, `list of text`, `observed.NAME`."""
    if "$ref" in schema:
        return _type(definitions.get(schema["$ref"].rsplit("/", 1)[-1], {}), definitions)
    if "anyOf" in schema:
        words = [_type(one, definitions) for one in schema["anyOf"] if one.get("type") != "null"]
        return " | ".join(dict.fromkeys(words))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "pattern" in schema and schema["pattern"] == _observed_pattern():
        return "observed.NAME"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), definitions)}"
    names = {"string": "text", "boolean": "true | false", "object": "map", "integer": "whole number"}
    word = names.get(kind, str(kind))
    return word + "".join(
        f" {sign} {schema[key]:,}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", "≥"),
            ("exclusiveMaximum", "<"),
            ("maximum", "≤"),
        )
        if key in schema
    )


def _observed_pattern() -> str:
    from gradwatch.detectors.detector import OBSERVED_PATTERN  # not at the top: it needs numpy

    return OBSERVED_PATTERN


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return sentence + "." * bool(dot)


def _shown(value: Any) -> str:
    return "–" if value is None else json.dumps(value, ensure_ascii=False).strip('"')


_TOPICS = {
    "kinds": _kinds,
    "columns": _columns,
    "actions": _actions,
    "policies": _policies,
    "sinks": _sinks,
}
