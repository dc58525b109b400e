"""The JSON Schema and the loader say the same of a file, as far as a schema can tell."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gradwatch.detectors import DETECTORS
from gradwatch.errors import RuleFileError
from gradwatch.policies import POLICIES
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.files import json_schema, parse_rules
from gradwatch.rules.packs import pack_directory
from gradwatch.rules.sink_kinds import SINKS
from tests.support.examples import examples

SHAPE = {"GW006", "GW101", "GW102", "GW103", "GW104", "GW105", "GW106", "GW107", "GW201", "GW203", "GW204"}
"""What a schema can see; the other codes need the rest of the file, or the text itself."""

VALIDATOR = jsonschema.Draft7Validator(json_schema())

VALID: dict[str, Any] = {
    "version": 1,
    "defaults": {
        "warmup": 20,
        "half_life": 100,
        "cooldown": 20,
        "severity": "warning",
        "for": 2,
        "mode": "act",
    },
    "groups": {"matrices": {"params": ["*"], "min_ndim": 2}, "rest": {"params": ["*"], "optional": True}},
    "rules": {
        "non-finite": {
            "detect": {"kind": "nonfinite", "of": "norm", "values": ["nan", "inf"]},
            "severity": "critical",
            "do": [
                {"snapshot": {"batch": True, "parameters": False, "keep": 2, "max_bytes": 9}},
                "stop",
                {"skip_step": {"max_consecutive": 10, "then": "stop"}},
                {"localise": None},
            ],
            "annotations": {"summary": "{param} at {step}", "runbook_url": "https://example.org"},
        },
        "exploding": {
            "detect": {"kind": "spike", "of": "norm", "above": 10, "clear_below": 3},
            "scope": "param",
            "groups": ["matrices"],
            "exclude": ["*.bias"],
            "for": 1,
            "every": 1,
            "warmup": 30,
            "keep_firing_for": 20,
            "on_error": "skip_step",
            "do": [{"clip": {"to": "baseline"}}, {"escalate": {"after": "3 in 100", "to": "stop"}}],
            "labels": {"team": "vision"},
        },
        "depth": {"detect": {"kind": "depth_ratio", "below": 1e-3, "depths": [0, 3]}, "enabled": False},
        "rail": {"detect": {"kind": "above", "of": "total_norm", "threshold": 1e3}, "optional": True},
        "joined": {
            "when": {
                "all": ["rail", {"any": ["exploding", "non-finite"]}, {"not": "rail", "within": 5}],
                "within": 20,
            },
            "for": 2,
            "do": ["stop"],
        },
    },
    "clip": {
        "total": {"method": "norm", "max_norm": 1.0},
        "groups": {"matrices": {"method": "agc", "ratio": 0.01}},
        "at": "step",
    },
    "modules": {"tap": "output", "names": ["*"]},
    "sinks": [
        "log",
        {"prometheus": {"listen": "127.0.0.1:29440", "params": "worst", "top_k": 5}},
        {"journal": {"dir": "./runs", "max_bytes": 67108864}},
    ],
    "overrides": [{"match": {"run": "*-debug"}, "defaults": {"cooldown": 5}, "sinks": ["log"]}],
}
STRANGE: list[Any] = [None, True, False, 0, 1, -1, 2, 2.5, 1e-7, 10**12, "", "x", "10 steps", "stop", "*"]
STRANGE += [
    "param",
    [],
    {},
    ["*"],
    [1],
    {"x": 1},
    {"kind": "spike"},
    {"method": "norm"},
    "a b",
    [[]],
    ["stop"],
]
WORDS = [
    "x",
    "kind",
    "above",
    "for",
    "of",
    "threshold",
    "params",
    "method",
    "stop",
    "a b",
    "to",
    "severity",
    "match",
]


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from places(value)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """The valid document with up to three changes: a value replaced, a key deleted, a key added."""
    document = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(0, 3))):
        container, key = draw(st.sampled_from(list(places(document))))
        edit = draw(st.sampled_from(["replace", "delete", "add"]))
        if edit == "replace":
            container[key] = copy.deepcopy(draw(st.sampled_from(STRANGE)))
        elif edit == "delete":
            del container[key]
        elif isinstance(container, dict):
            container[draw(st.sampled_from(WORDS))] = copy.deepcopy(draw(st.sampled_from(STRANGE)))
    return document


def refused_codes(document: Any) -> set[str]:
    """What the loader says of the document (JSON is YAML)."""
    try:
        parse_rules(json.dumps(document))
    except RuleFileError as error:
        return {problem.code for problem in error.problems}
    return set()


def partial(document: dict[str, Any]) -> bool:
    """Whether it speaks of another file's rules or groups: the schema allows it, the loader looks."""
    rules, overrides = document.get("rules"), document.get("overrides")
    found = list(rules.values()) if isinstance(rules, dict) else []
    detects = [each["detect"] for each in found if isinstance(each, dict) and "detect" in each]
    changed = [item for item in overrides if isinstance(item, dict)] if isinstance(overrides, list) else []
    return any(isinstance(each, dict) and "kind" not in each for each in detects) or any(
        item.keys() & {"rules", "groups"} for item in changed
    )


@pytest.mark.parametrize("short", [lambda name: name, lambda name: {name: None}], ids=["bare", "null"])
@pytest.mark.parametrize(
    ("name", "taken"),
    [("escalate", False), ("rescale", False), ("skip_step", True), ("textfile", False), ("wandb", True)],
)
def test_the_short_form_is_for_what_needs_no_parameter(name: str, taken: bool, short: Any) -> None:
    """An action or a sink that must be told something is refused without it, by schema and loader alike."""
    document = copy.deepcopy(VALID)
    if name in SINKS:
        document["sinks"] = [short(name)]
    else:
        document["rules"]["non-finite"]["do"] = [short(name)]
    assert VALIDATOR.is_valid(document) is taken
    assert (refused_codes(document) == set()) is taken


def test_schema_is_a_schema() -> None:
    """It is valid draft 7, and plain JSON."""
    jsonschema.Draft7Validator.check_schema(json_schema())
    assert json.loads(json.dumps(json_schema())) == json_schema()


@pytest.mark.parametrize(
    ("section", "valid"),
    [
        ({}, True),
        ({"every": 10, "params": ["*.weight"]}, True),
        ({"of": ["gradients"]}, True),
        ({"of": ["gradients", "activations"], "modules": ["*"]}, True),
        ({"of": "activations"}, False),
        ({"of": ["weights"]}, False),
        ({"of": []}, False),
        ({"every": 0}, False),
        ({"params": []}, False),
        ({"bins": 3}, False),
        ([], False),
    ],
)
def test_histograms_in_the_schema(section: Any, valid: bool) -> None:
    """The section `histograms:` is judged alike by an editor and by the loader."""
    document = {"version": 1, "rules": {}, "histograms": section, "modules": {}}
    assert VALIDATOR.is_valid(document) == (not refused_codes(document)) == valid


@pytest.mark.parametrize(
    ("of", "valid"),
    [("observed.val/acc", True), ("observed.", False), ("observed.a b", False), ("acc", False)],
)
def test_observed_names_in_the_schema(of: str, valid: bool) -> None:
    """An editor knows an observed value by its prefix, as the loader does."""
    detect = {"kind": "above", "of": of, "threshold": 1.0}
    document = {"version": 1, "rules": {"r": {"detect": detect}}}
    assert VALIDATOR.is_valid(document) == (not refused_codes(document)) == valid


def test_valid_document_is_valid_for_both() -> None:
    """The document all others are made from is accepted by both."""
    assert not refused_codes(VALID)
    VALIDATOR.validate(VALID)


@pytest.mark.parametrize(
    "pack", sorted(pack_directory().glob("*.gradwatch.yaml")), ids=lambda path: path.name
)
def test_shipped_packs_fit_the_schema(pack: Path) -> None:
    """Editors show no error in what we ship."""
    VALIDATOR.validate(YAML(typ="safe", pure=True).load(pack.read_text(encoding="utf-8")))


@settings(max_examples=examples(50))
@given(documents())
def test_schema_and_loader_agree(document: dict[str, Any]) -> None:
    """A changed document is refused for its shape by both or by neither."""
    assume(not partial(document))
    codes = refused_codes(document)
    assert VALIDATOR.is_valid(document) == (not codes & SHAPE), (codes, document)


@pytest.mark.parametrize("kind", sorted(DETECTORS))
def test_every_kind_is_in_the_schema(kind: str) -> None:
    """A registered kind is offered, its unknown keys refused."""
    document = {"version": 1, "rules": {"r": {"detect": {"kind": kind, "nonsense": 1}}}}
    assert not VALIDATOR.is_valid(document)
    required = {"above": {"threshold": 1}, "below": {"threshold": 1}}.get(kind, {})
    document["rules"] = {"r": {"detect": {"kind": kind, **required}}}
    VALIDATOR.validate(document)
    assert not refused_codes(document)


OF_NONFINITE = ("zero_nonfinite", "drop_micro")  # refused of rules about finite numbers


def test_every_action_and_method_validates() -> None:
    """All of the language's actions and clipping methods are accepted with their defaults."""
    needs = {"rescale": {"factor": 0.5}, "escalate": {"after": "1 in 2", "to": "stop"}}
    do = [{name: needs.get(name, {})} for name in ACTIONS if name not in OF_NONFINITE]
    given = {"value": {"clip_value": 1}}
    for method in POLICIES:
        policy = {"method": method, **given.get(method, {})}
        document = {
            "version": 1,
            "rules": {
                "r": {"detect": {"kind": "spike"}, "do": do},
                "n": {"detect": {"kind": "nonfinite"}, "do": [{name: {}} for name in OF_NONFINITE]},
            },
            "clip": {"total": policy},
        }
        VALIDATOR.validate(document)
        assert not refused_codes(document), method
