"""`detect:` -> a detector: any registered kind is validated by being registered."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

import gradwatch.detectors  # noqa: F401  (registers the built-in kinds)
from gradwatch.detectors.detector import DETECTORS, KNOWN_NOT_BUILT, Detector, find_detector, rule_keys
from gradwatch.rules.condition import When
from gradwatch.rules.files import words_of_other_tools
from gradwatch.rules.files.key_validation import check, keys_of, right_keys
from gradwatch.rules.files.pydantic_models import RuleEntry, detector_model
from gradwatch.rules.key_descriptions import described
from gradwatch.rules.threshold_ranges import out_of_reach
from gradwatch.rules.yaml.nodes import Map, Mark, Scalar, data, without
from gradwatch.rules.yaml.problems import Problems, quoted, shown
from gradwatch.runtime.interruption import not_ours

_IN_RULE = dict.fromkeys(keys_of(RuleEntry), "a key of the rule: write it beside `detect:`")
ANY_NUMBER = 1.0
"""In the place of a required key that is wrong, where the rest of a rule is checked."""
_IN_GROUP = dict.fromkeys(
    ("params", "min_ndim"),
    "a key of a group: `groups: {mine: {params: [...]}}` beside `rules:`, and `groups: [mine]`",
)


@dataclass(slots=True)
class Found:
    """A detector's class and validated values; `cls` None: not to be had in this version, `reason` says
    why.

    `right` False: some values are wrong, which was reported; `values` then has the others, and any number for those
    that are required.
    """

    cls: type[Detector] | None
    values: dict[str, Any]
    reason: str = ""
    right: bool = True


def find_kind(node: Map, at: Mark, where: str, problems: Problems) -> Found | None:
    """The detector that `detect:` asks for, or None after reporting what is wrong."""
    kind = node.get("kind")
    if kind is None:
        if "kind" not in node.dropped:
            known = ", ".join(sorted(DETECTORS))
            problems.add(at, "GW102", f"`detect` of {where} lacks the key 'kind'", f"kinds: {known}")
        return None
    if not isinstance(kind, Scalar) or not isinstance(kind.value, str):
        mark = kind.mark if isinstance(kind, Scalar) else node.key_mark("kind")
        problems.add(mark, "GW103", f"'kind' must be text, not {shown(kind)}")
        return None
    if kind.text in KNOWN_NOT_BUILT and kind.text not in DETECTORS:
        return Found(None, {}, f"the detector '{kind.text}' is not built yet")
    cls = _kind(kind, problems)
    if cls is None:
        return None
    wanted = detector_model(cls)
    advice = {**_IN_GROUP, **words_of_other_tools.detect_keys(described(cls)), **_IN_RULE}
    keys = without(node, "kind")
    model = check(keys, wanted, problems, at, f"detect '{kind.text}'", advice)
    right = model is not None
    model = model or _completed(keys, wanted)
    if model is None:
        return None
    return Found(cls, {name: getattr(model, name) for name in type(model).model_fields}, right=right)


def _completed(keys: Map, wanted: type[BaseModel]) -> BaseModel | None:
    """The keys that are right, and any number for those that are required; None where these take no number."""
    required = [name for name, info in wanted.model_fields.items() if info.is_required()]
    values = dict.fromkeys(required, ANY_NUMBER) | data(right_keys(keys, wanted))
    try:
        return wanted.model_validate_json(json.dumps(values))
    except ValidationError:
        return None


def _kind(kind: Scalar, problems: Problems) -> type[Detector] | None:
    hint = ""
    try:
        cls = find_detector(kind.text) if len(kind.text) <= 100 else None
    except Exception as error:
        if not_ours(error):
            raise
        # A third-party package that does not import is the file's problem, not a crash.
        cls, hint = None, f"the package that provides it does not load: {type(error).__name__}"
    if cls is None:
        known = sorted({*DETECTORS, *KNOWN_NOT_BUILT})
        advice = words_of_other_tools.KINDS.get(kind.text.lower(), "")
        message = f"unknown detector kind {quoted(kind.text)}"
        message += "" if advice else problems.meant(kind.text, known)
        if kind.text == When.kind:
            hint = "a condition stands in the place of `detect:`: when: {all: […]}"
        problems.add(kind.mark, "GW201", message, hint or advice or f"kinds: {', '.join(known)}")
    return cls


def build_detector(
    found: Found, node: Map, at: Mark, rule_values: Mapping[str, int], problems: Problems
) -> Any:
    """The detector itself, with what the rule sets; None after reporting that its values contradict each
    other.
    """
    assert found.cls is not None
    problems = problems if found.right else Problems()  # what stands in may contradict the others
    own = {name: value for name, value in rule_values.items() if name in rule_keys(found.cls)}
    try:
        detector = found.cls(**found.values, **own)
    except Exception as error:  # whatever __post_init__ of a third-party kind may raise
        if not_ours(error):
            raise
        message = str(error)[:200]
        named = next((word for word in re.findall(r"\w+", message) if word in node.entries), None)
        mark = node.key_mark(named) if named else at
        problems.add(mark, "GW208", message)
        return None
    reason = out_of_reach(detector)
    threshold = node.get("threshold")
    if reason is not None and threshold is not None:
        problems.add(threshold.mark, "GW208", *reason)
        return None
    return detector
