"""The reference that `gradwatch rules kinds | columns | actions | policies | sinks` prints."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from gradwatch.cli import main
from gradwatch.cli.rules.reference import HELP, entries_of
from gradwatch.detectors import DETECTORS
from gradwatch.policies import POLICIES
from gradwatch.records.columns import CATALOGUE
from gradwatch.rules import key_descriptions
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.files import parse_rules
from gradwatch.rules.files.jsonschema import json_schema
from gradwatch.rules.sink_kinds import SINKS

KNOWN: dict[str, Collection[str]] = {
    "kinds": DETECTORS,
    "policies": POLICIES,
    "actions": ACTIONS,
    "sinks": SINKS,
    "columns": [one.name for one in CATALOGUE],
}


@pytest.mark.parametrize("topic", HELP)
def test_everything_is_listed_and_described(topic: str) -> None:
    """Each word that a rule file may hold is there; each of its keys has a type and a sentence."""
    entries = entries_of(topic)
    assert entries.keys() == set(KNOWN[topic])
    for name, entry in entries.items():
        assert entry["does"].strip(), name
        for key, one in entry.get("keys", {}).items():
            assert one["means"].endswith((".", ")")), (name, key)
            assert one["type"] != "any", (name, key)


def test_actions_without_keys_say_what_they_do() -> None:
    """Each action begins with a sentence of its own, those that take no keys too."""
    first = {name: entry["does"].partition(".")[0] for name, entry in entries_of("actions").items()}
    assert len(set(first.values())) == len(first)
    assert "NaN or Inf to 0" in first["zero_nonfinite"]
    assert "TrainingStopped" in first["stop"]
    assert "micro-batch" in first["drop_micro"]


def test_observed_values_are_named_among_the_columns() -> None:
    """The values of `of:` are words that can be written there: `observed.NAME`, not "text"."""
    columns = {
        name: entry["keys"]["of"]["type"]
        for name, entry in entries_of("kinds").items()
        if "of" in entry["keys"]
    }
    assert not [name for name, words in columns.items() if "text" in words.split(" | ")]
    assert columns["plateau"] == "loss | observed.NAME"


def test_no_sentence_is_left_of_a_key_that_is_gone() -> None:
    """Each described key belongs to a kind or a policy; so does each that a kind has for itself."""
    keys = {
        (name, key)
        for topic in ("kinds", "policies")
        for name, entry in entries_of(topic).items()
        for key in entry["keys"]
    }
    of_rules = {"warmup", "half_life"}  # some kinds have them from the rule
    assert {key for _, key in keys} | of_rules >= key_descriptions.NAMES
    assert keys >= key_descriptions.OF_KINDS


def test_editors_get_the_same_sentences() -> None:
    """The schema holds the sentence of a key as its description."""
    text = json.dumps(json_schema(), ensure_ascii=False)
    for entry in entries_of("kinds").values():
        for one in entry["keys"].values():
            assert json.dumps(one["means"], ensure_ascii=False) in text


@pytest.mark.parametrize("topic", HELP)
def test_the_commands_print_it(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The list, one entry, both as JSON; an unknown name is exit 2 and names what is like it."""
    assert main(["rules", topic]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in KNOWN[topic])
    first = next(iter(KNOWN[topic]))
    assert main(["rules", topic, first]) == 0
    assert first in capsys.readouterr().out
    assert main(["rules", topic, first, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {first: entries_of(topic)[first]}
    assert main(["rules", topic, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == set(KNOWN[topic])
    assert main(["rules", topic, f"{first}xx"]) == 2
    assert f"there is no '{first}xx'" in capsys.readouterr().err


def test_explain_knows_kinds_too(capsys: pytest.CaptureFixture[str]) -> None:
    """`rules explain spike` is `rules kinds spike`."""
    assert main(["rules", "kinds", "spike"]) == 0
    page = capsys.readouterr().out
    assert main(["rules", "explain", "spike"]) == 0
    assert capsys.readouterr().out == page
    assert "Deviations above the usual level" in page


@pytest.mark.parametrize(
    ("topic", "name"), [("actions", "snapshot"), ("columns", "lr"), ("sinks", "webhook")]
)
def test_explain_knows_every_word_of_a_rule_file(
    topic: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Actions, columns, policies and sinks too, as the topic of each prints them."""
    assert main(["rules", topic, name]) == 0
    page = capsys.readouterr().out
    assert main(["rules", "explain", name]) == 0
    assert capsys.readouterr().out == page


def test_what_is_said_of_defaults_is_so() -> None:
    """The defaults in the reference are those of a rule that leaves every key out."""
    for name, entry in entries_of("kinds").items():
        if any(one["required"] for one in entry["keys"].values()) or name == "depth_ratio":
            continue
        (rule,) = parse_rules(f"version: 1\nrules: {{r: {{detect: {{kind: {name}}}}}}}\n", "x.yaml").rules
        for key, one in entry["keys"].items():
            value = getattr(rule.detect, key)
            assert one["default"] == (list(value) if isinstance(value, tuple) else value), (name, key)


def test_what_is_said_of_the_end_of_firing_is_so() -> None:
    """A kind that clears elsewhere than where it fires says so."""
    for name, entry in entries_of("kinds").items():
        if "clear_below" in entry["keys"] and not any(one["required"] for one in entry["keys"].values()):
            if name == "depth_ratio":
                continue
            detector = DETECTORS[name]()
            at_three = "by default 3" in entry["keys"]["clear_below"]["means"]
            assert (detector.clears_at != detector.fires_at) == at_three, name


def test_a_key_of_a_third_party_is_described_by_its_field() -> None:
    """The field's metadata is the sentence; without it there is none."""

    @dataclass(frozen=True)
    class Mine:
        kind = "mine"
        bound: float = field(default=1.0, metadata={"description": "Where it fires."})
        other: float = 2.0

    assert key_descriptions.described(Mine) == {"bound": "Where it fires.", "other": ""}
