"""A rule set as plain data, and its digest: equal for two files that mean the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from gradwatch.rules.rule_set import Rule, RuleSet

_NOT_CONTENT = ("digest", "origins")
_NAMES: dict[type, tuple[str, ...]] = {}


def canonical(ruleset: RuleSet) -> dict[str, Any]:
    """Everything a rule set says as dict, list, str, int, float, bool and None; without digest and
    origins.
    """
    plain: dict[str, Any] = _plain({f.name: getattr(ruleset, f.name) for f in fields(ruleset)})
    return {key: value for key, value in plain.items() if key not in _NOT_CONTENT}


def digest(ruleset: RuleSet) -> str:
    """sha256 (hex) of the canonical form."""
    text = json.dumps(canonical(ruleset), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Rule):
        detect = {"kind": value.kind, **_fields(value.detect)}
        return {**_fields(value), "detect": detect}
    if hasattr(value, "__dataclass_fields__"):
        return _fields(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(each) for each in value)
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {name: _plain(getattr(value, name)) for name in _names(type(value))}


def _names(cls: type) -> tuple[str, ...]:
    if cls not in _NAMES:  # dataclasses.fields is slow, and every rule asks
        _NAMES[cls] = tuple(each.name for each in fields(cls))
    return _NAMES[cls]
