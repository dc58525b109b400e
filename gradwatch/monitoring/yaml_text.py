"""Plain data as YAML that people read: block style, long texts on lines of their own, always the same bytes."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString


def to_yaml(document: Any, comment: str = "") -> str:
    """`document` (dicts, lists, strings, numbers, booleans) as YAML under a `#` comment."""
    writer = YAML()
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    writer.dump(_styled(document), out)
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + out.getvalue()


def _styled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _styled(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_styled(each) for each in value]
    return LiteralScalarString(value) if isinstance(value, str) and "\n" in value else value
