"""One file by itself: every map against its model, whatever other files it is merged with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields

from gradwatch.detectors.detector import DETECTORS
from gradwatch.rules.field_types import NAME
from gradwatch.rules.files import words_of_other_tools
from gradwatch.rules.files.annotations import check_annotations, check_labels
from gradwatch.rules.files.do_and_sinks_sections import actions, sinks
from gradwatch.rules.files.key_validation import check, keys_of
from gradwatch.rules.files.model_base import Model
from gradwatch.rules.files.pydantic_models import (
    ClipEntry,
    Defaults,
    Document,
    GroupEntry,
    HistogramsEntry,
    Match,
    ModulesEntry,
    Override,
    RuleEntry,
)
from gradwatch.rules.files.when_section import when_section
from gradwatch.rules.yaml.nodes import Map, Node, Scalar, Seq
from gradwatch.rules.yaml.problems import Problems, quoted, shown

_IN_RULE = dict.fromkeys(keys_of(RuleEntry), "a key of a rule: write it below the rule's id in `rules:`")

_OF_FILE = {**words_of_other_tools.FILE_KEYS, **_IN_RULE}


def check_sections_of_file(document: Map, problems: Problems) -> None:
    """Report everything that is wrong with the shape of one file."""
    check(document, Document, problems, document.mark, "the file", _OF_FILE)
    sections(document, problems)
    overrides = document.get("overrides")
    for item in overrides.items if isinstance(overrides, Seq) else ():
        if isinstance(item, Map):
            _override(item, problems)


def _override(item: Map, problems: Problems) -> None:
    check(item, Override, problems, item.mark, "an override", _OF_FILE)
    match = item.get("match")
    if isinstance(match, Map):
        check(match, Match, problems, item.key_mark("match"), "`match`", words_of_other_tools.MATCH_KEYS)
    sections(item, problems)


def sections(document: Map, problems: Problems) -> None:
    """The sections that a document and an override share."""
    models: tuple[tuple[str, type[Model], Mapping[str, str]], ...] = (
        ("defaults", Defaults, words_of_other_tools.DEFAULTS_KEYS),
        ("clip", ClipEntry, words_of_other_tools.CLIP_KEYS),
        ("modules", ModulesEntry, {}),
        ("histograms", HistogramsEntry, {}),
    )
    for key, model, elsewhere in models:
        node = document.get(key)
        if isinstance(node, Map):
            check(node, model, problems, document.key_mark(key), f"`{key}`", elsewhere)
    sinks(document.get("sinks"), problems)
    _named(document.get("groups"), "group", GroupEntry, problems)
    _named(document.get("rules"), "rule", RuleEntry, problems)
    rules = document.get("rules")
    for rule_id, entry in rules.entries.items() if isinstance(rules, Map) else ():
        if isinstance(entry.node, Map):
            actions(entry.node.get("do"), problems)
            check_annotations(entry.node.get("annotations"), problems)
            check_labels(entry.node.get("labels"), problems)
            when = entry.node.get("when")
            if isinstance(when, Map):
                when_section(when, entry.node.key_mark("when"), f"rule {quoted(rule_id)}", problems)


def _named(section: Node | None, what: str, model: type[Model], problems: Problems) -> None:
    elsewhere = _in_detect() if model is RuleEntry else words_of_other_tools.GROUP_KEYS
    for name, (mark, node) in section.entries.items() if isinstance(section, Map) else ():
        if not re.fullmatch(NAME.strip("^$"), name):
            message = f"{quoted(name)} cannot name a {what}"
            problems.add(
                mark,
                "GW106",
                message,
                "letters, digits, '_', '.' and '-', at most 64, starting with one of the first",
            )
        if isinstance(node, Map):
            check(node, model, problems, mark, f"{what} {quoted(name)}", elsewhere)
        else:
            place = node.mark if isinstance(node, Scalar) and node.value is not None else mark
            problems.add(
                place, "GW103", f"{what} {quoted(name)} must be a map, not {shown(node)}", _hint(what, node)
            )


def _hint(what: str, node: Node) -> str:
    """The way out where a map was expected."""
    if what == "group":
        return '{params: ["*"]}'
    off = isinstance(node, Scalar) and node.text.lower() in (
        "off",
        "false",
        "no",
        "none",
        "null",
        "disabled",
        "~",
        "",
    )
    return "{enabled: false} switches it off" if off else ""


def _in_detect() -> dict[str, str]:
    keys = {each.name for cls in DETECTORS.values() for each in fields(cls)}  # type: ignore[arg-type]
    keys = (keys | {"kind"}) - set(keys_of(RuleEntry))
    inside = dict.fromkeys(keys, "a key of the detector: write it inside `detect:`")
    return {**words_of_other_tools.RULE_KEYS, **inside}
