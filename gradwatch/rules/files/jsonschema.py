"""The JSON Schema of rule files (draft 7, which yaml-language-server understands), made from the same models.

It says what a single file may look like; what a word means elsewhere in the file (is there such a group?)
only the loader knows. Dispatch on `kind` and `method` is by if/then, which gives one clear message and
completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from gradwatch.detectors.detector import DETECTORS, KNOWN_NOT_BUILT
from gradwatch.policies import POLICIES
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.condition import JOINS
from gradwatch.rules.field_types import NAME
from gradwatch.rules.files.model_base import parameters_model
from gradwatch.rules.files.pydantic_models import (
    ClipEntry,
    ConditionEntry,
    Defaults,
    Document,
    GroupEntry,
    HistogramsEntry,
    Match,
    ModulesEntry,
    Override,
    RuleEntry,
    detector_model,
    policy_model,
)
from gradwatch.rules.sink_kinds import SINKS

DIALECT = "http://json-schema.org/draft-07/schema#"
Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema of a rule file, including every detector kind registered at this moment."""
    entries: dict[str, type[BaseModel]] = {
        "Defaults": Defaults,
        "Group": GroupEntry,
        "Rule": RuleEntry,
        "Condition": ConditionEntry,
        "Clip": ClipEntry,
        "Modules": ModulesEntry,
        "Histograms": HistogramsEntry,
        "Match": Match,
        "Override": Override,
    }
    definitions = {name: _of(model) for name, model in entries.items()}
    _fill(definitions)
    schema = _of(Document)
    _sections(schema)
    schema["properties"]["overrides"]["items"] = _ref("Override")
    # A rule of a file that extends nothing has to say itself what it judges.
    judging = {
        "oneOf": [{"required": ["detect"]}, {"required": ["when"]}],
        "properties": {"detect": {"required": ["kind"]}},
    }
    complete = {
        "rules": {"additionalProperties": judging},
        "groups": {"additionalProperties": {"required": ["params"]}},
    }
    schema["if"] = {"not": {"required": ["extends"]}}
    schema["then"] = {"properties": complete}
    head = {"$schema": DIALECT, "$id": "urn:gradwatch:rule-file:1", "title": "gradwatch rule file, version 1"}
    return {**head, **schema, "definitions": dict(sorted(definitions.items()))}


def _fill(definitions: dict[str, Schema]) -> None:
    """Put the maps into the places where the flat models say only "a map"."""
    definitions["Detect"] = _dispatch(
        "kind", {kind: detector_model(cls) for kind, cls in sorted(DETECTORS.items())}
    )
    definitions["Detect"]["properties"]["kind"]["enum"] += sorted(KNOWN_NOT_BUILT - set(DETECTORS))
    # Without `kind` it changes an inherited rule; the loader knows whether there is one.
    del definitions["Detect"]["required"]
    definitions["Policy"] = _dispatch(
        "method", {method: policy_model(cls) for method, cls in sorted(POLICIES.items())}
    )
    actions = {name: parameters_model(kind.params) for name, kind in ACTIONS.items()}
    definitions["Action"] = _items(actions, sorted(ACTIONS))
    options = {
        name: parameters_model(kind.options) for name, kind in SINKS.items() if kind.options is not None
    }
    definitions["Sink"] = _items(options, sorted(SINKS))
    rule = definitions["Rule"]["properties"]
    rule["detect"] = _ref("Detect")
    rule["do"]["items"] = _ref("Action")
    rule["when"] = _ref("Condition")
    _joining(definitions["Condition"])
    definitions["Clip"]["properties"]["total"] = _ref("Policy")
    definitions["Clip"]["properties"]["groups"] = {"type": "object", "additionalProperties": _ref("Policy")}
    definitions["Override"]["properties"]["match"] = _ref("Match")
    _sections(definitions["Override"])


def _joining(schema: Schema) -> None:
    """Exactly one of all, any and not, each of ids of rules and of further conditions."""
    part, properties = {"anyOf": [{"type": "string"}, _ref("Condition")]}, schema["properties"]
    for key in ("all", "any"):
        properties[key]["items"] = part
    properties["not"] |= part
    schema["oneOf"] = [{"required": [key]} for key in JOINS]


def _sections(schema: Schema) -> None:
    properties = schema["properties"]
    for key in ("defaults", "clip", "modules", "histograms"):
        properties[key] = {**_ref(key.capitalize())}
    for key, name in (("groups", "Group"), ("rules", "Rule")):
        properties[key].update(propertyNames={"pattern": NAME}, additionalProperties=_ref(name))
    properties["sinks"]["items"] = _ref("Sink")


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _dispatch(key: str, models: Mapping[str, type[BaseModel]]) -> Schema:
    """A map whose other keys depend on the value of `key`."""
    branches = []
    for name, model in models.items():
        then = _of(model)
        then["properties"] = {**then.get("properties", {}), key: True}
        condition = {"properties": {key: {"const": name}}, "required": [key]}
        branches.append({"if": condition, "then": then})
    return {
        "type": "object",
        "properties": {key: {"type": "string", "enum": list(models)}},
        "required": [key],
        "allOf": branches,
    }


def _items(models: Mapping[str, type[BaseModel]], names: list[str]) -> Schema:
    """`name`, or `{name: {…}}` with one key; nothing after the colon means no parameters.

    Where a parameter has no default, only the full form is left.
    """
    schemas = {name: _of(model) for name, model in models.items()}
    bare = [name for name in names if "required" not in schemas.get(name, {})]
    known = {
        name: {"anyOf": [{"type": "null"}, schema]} if name in bare else schema
        for name, schema in schemas.items()
    }
    others = {name: {"type": ["object", "null"]} for name in names if name not in models}
    one = {
        "type": "object",
        "properties": {**known, **others},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {"anyOf": [{"enum": bare}, one]}


def _of(model: type[BaseModel]) -> Schema:
    """A model's own schema, inlined and without the noise pydantic adds."""
    schema: Schema = model.model_json_schema(by_alias=True)
    assert "$defs" not in schema, f"{model.__name__} must be flat"
    for each in schema.get("properties", {}).values():
        each.pop("title", None)
        if each.get("default", 0) is None:
            del each["default"]
        _draft7(each)
    schema.pop("title", None)
    return schema


def _draft7(schema: Any) -> None:
    """Convert pydantic's draft to draft 7: tuples, and keys that must fit a pattern."""
    if isinstance(schema, dict):
        if "prefixItems" in schema:
            schema["items"], schema["additionalItems"] = schema.pop("prefixItems"), False
        if "patternProperties" in schema:
            schema["additionalProperties"] = False
        for each in schema.values():
            _draft7(each)
    elif isinstance(schema, list):
        for each in schema:
            _draft7(each)
