"""Shipped packs as they resolve, each in a file beside its YAML: a watch by one of them parses and checks nothing.

To parse, check and resolve the default pack takes 0.2 s, most of it the imports of what does so. `python -m
tests.rules.write_resolved_packs` writes the files, `tests/rules/test_resolved_packs.py` compares them with what the
YAML says, and a pack whose text, or that of a pack it extends, is no longer the one that was resolved has none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gradwatch.detectors import find_detector
from gradwatch.rules.condition import When, when_of
from gradwatch.rules.packs import SUFFIX, pack_directory, pack_path
from gradwatch.rules.rule_set import (
    Action,
    Clip,
    ClipPolicy,
    Group,
    Histograms,
    Modules,
    Rule,
    RuleSet,
    SinkSpec,
)

RESOLVED = ".resolved.json"
DEFAULT = "default"
"""An origin that is no place in a file."""

T = TypeVar("T")


def resolved_pack(name: str) -> RuleSet | None:
    """The rule set of a shipped pack; None where `name` is none, or its text is not the one that was resolved."""
    if pack_path(name) is None:
        return None
    try:
        document = json.loads((pack_directory() / (name + RESOLVED)).read_bytes())
    except FileNotFoundError:
        return None
    if any(text_digest(one) != digest for one, digest in document["texts"].items()):
        return None
    return rule_set(document["rules"], _places(document["origins"]), document["digest"])


def text_digest(name: str) -> str:
    """sha256 (hex) of the YAML text of a shipped pack; "" where there is none."""
    path = pack_path(name)
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def rule_set(rules: Mapping[str, Any], origins: Mapping[str, str], digest: str) -> RuleSet:
    """Make a rule set of its canonical form: of JSON's lists those are tuples that the resolved nouns have as tuples.

    Raises `LookupError` for a detector that is not known in this process.
    """
    return RuleSet(
        version=rules["version"],
        groups=tuple(_made(Group, one) for one in rules["groups"]),
        rules=tuple(map(_rule, rules["rules"])),
        clip=_if_given(_clip, rules["clip"]),
        modules=_if_given(lambda given: _made(Modules, given), rules["modules"]),
        histograms=_if_given(lambda given: _made(Histograms, given), rules["histograms"]),
        sinks=_if_given(lambda given: tuple(SinkSpec(**one) for one in given), rules["sinks"]),
        digest=digest,
        origins=origins,
        inactive=rules["inactive"],
    )


def _rule(given: Mapping[str, Any]) -> Rule:
    detect = dict(given["detect"])
    kind = detect.pop("kind")
    actions = tuple(Action(**one) for one in given["do"])
    if kind == When.kind:
        return _made(Rule, {**given, "detect": when_of(detect), "do": actions})
    detector = find_detector(kind)
    if detector is None:
        raise LookupError(f"detector {kind!r} is not known in this process")
    return _made(Rule, {**given, "detect": _made(detector, detect), "do": actions})


def _clip(given: Mapping[str, Any]) -> Clip:
    total = _if_given(lambda policy: ClipPolicy(**policy), given["total"])
    groups = {name: ClipPolicy(**policy) for name, policy in given["groups"].items()}
    return Clip(**{**given, "total": total, "groups": groups})


def _made(kind: Callable[..., T], given: Mapping[str, Any]) -> T:
    return kind(**{key: tuple(one) if isinstance(one, list) else one for key, one in given.items()})


def _if_given(make: Callable[[Any], T], given: Any) -> T | None:
    return None if given is None else make(given)


def _places(origins: Mapping[str, str]) -> dict[str, str]:
    """Places in packs, "NAME:LINE", with the paths that the packs have here."""
    folder = str(pack_directory())  # once: there are some 800 places
    found = {}
    for key, place in origins.items():
        name, _, line = place.partition(":")
        found[key] = place if place == DEFAULT else f"{os.path.join(folder, name)}{SUFFIX}:{line}"
    return found
