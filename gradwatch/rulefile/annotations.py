"""Texts for people and labels for machines: placeholders and reserved names, checked before training
starts.
"""

from __future__ import annotations

import re
from string import Formatter

from gradwatch.rulefile.nodes import Map, Node, Problems, Scalar, quoted

PLACEHOLDERS = ("param", "group", "value", "step", "rank", "nonfinite", "numel", "threshold", "count")
"""What an annotation may hold in single braces; everything is filled in as text."""
RESERVED_LABELS = frozenset(
    {"alertname", "incident", "instance", "job", "kind", "rank", "rule", "run_id", "severity"}
)
"""Labels that gradwatch or Prometheus sets itself."""


def check_annotations(node: Node | None, problems: Problems) -> None:
    """Report every placeholder that would not be filled in."""
    for text in _texts(node):
        doubled = re.search(r"\{\{\s*\$?\.?(\w+)\s*\}\}", text.text)
        if doubled and doubled.group(1) in PLACEHOLDERS:
            message = f"{doubled.group()} would be written as it stands"
            problems.add(text.mark, "GW210", message, f"single braces: {{{doubled.group(1)}}}")
        try:
            parts = list(Formatter().parse(text.text))
        except ValueError as error:
            hint = "double a brace that is meant literally: {{ or }}"
            problems.add(text.mark, "GW210", f"broken placeholder: {error}", hint)
            continue
        for _, name, form, conversion in parts:
            if name is not None:
                _placeholder(text, name, form or "", conversion or "", problems)


def _placeholder(text: Scalar, name: str, form: str, conversion: str, problems: Problems) -> None:
    if name not in PLACEHOLDERS:
        message = f"unknown placeholder {quoted('{' + name + '}')}{problems.meant(name, PLACEHOLDERS)}"
        problems.add(text.mark, "GW210", message, f"known: {', '.join(PLACEHOLDERS)}")
    elif form or conversion:
        problems.add(text.mark, "GW210", f"the placeholder {{{name}}} takes no format", f"write {{{name}}}")


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
