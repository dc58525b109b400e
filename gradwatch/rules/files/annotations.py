"""Texts for people and labels for machines: placeholders and reserved names, checked before training
starts.
"""

from __future__ import annotations

import re

from gradwatch.rules.yaml.nodes import Map, Node, Scalar
from gradwatch.rules.yaml.problems import Problems, quoted

PLACEHOLDERS = (
    "param",
    "where",
    "group",
    "kind",
    "rule",
    "value",
    "score",
    "threshold",
    "beyond",
    "step",
    "rank",
    "nonfinite",
    "numel",
    "count",
)
"""What an annotation may hold in single braces; everything is filled in as text."""
_FILLED = frozenset(f"{{{name}}}" for name in PLACEHOLDERS)
RESERVED_LABELS = frozenset(
    {"alertname", "incident", "instance", "job", "kind", "process", "rank", "rule", "run_id", "severity"}
)
"""Labels that gradwatch or Prometheus sets itself."""


def check_annotations(node: Node | None, problems: Problems) -> None:
    """Report every brace that is not part of a placeholder that will be filled in."""
    for text in _texts(node):
        # Template languages double their braces; the word inside is what was meant.
        for found in re.finditer(r"\{\{?\s*[$.]{0,2}([^{}]*?)\s*\}\}?|[{}]", text.text):
            if found.group() not in _FILLED:
                _refuse(text, found.group(), (found.group(1) or "").strip(), problems)


def _refuse(text: Scalar, written: str, name: str, problems: Problems) -> None:
    word = name.split(":")[0].split("!")[0].strip()
    if word in PLACEHOLDERS:
        message, hint = f"{quoted(written)} is not filled in", f"write {{{word}}}, without anything else"
    elif name:
        message = f"unknown placeholder {quoted(written)}{problems.meant(word, PLACEHOLDERS)}"
        hint = f"known: {', '.join(PLACEHOLDERS)}"
    else:
        message, hint = (
            f"a brace that belongs to no placeholder: {quoted(written)}",
            "braces cannot be escaped",
        )
    problems.add(text.mark, "GW210", message, hint)


def check_labels(node: Node | None, problems: Problems) -> None:
    """Report labels whose names are taken."""
    for name, entry in node.entries.items() if isinstance(node, Map) else ():
        if name in RESERVED_LABELS:
            problems.add(
                entry.key, "GW214", f"the label '{name}' is set by gradwatch itself", "choose another name"
            )


def _texts(node: Node | None) -> list[Scalar]:
    nodes = [entry.node for entry in node.entries.values()] if isinstance(node, Map) else []
    return [each for each in nodes if isinstance(each, Scalar) and isinstance(each.value, str)]
