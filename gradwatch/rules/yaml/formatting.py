"""The text of a rule file with even indentation: comments, quotes, order and line breaks stay as they are."""

from __future__ import annotations

import io

from gradwatch.runtime.warning_filters import filters_kept

with filters_kept():  # ruamel adds warning filters of its own when it is imported
    from ruamel.yaml import YAML

_WIDTH = 1 << 20  # no line is broken that was not


def formatted(text: str) -> str:
    """`text`, which must have been accepted as a rule file: two columns a level, four for lists, spaces one by one."""
    round_trip = YAML(typ="rt")  # makes maps, lists and scalars alone, whatever a tag says
    round_trip.preserve_quotes = True
    round_trip.width = _WIDTH
    round_trip.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    round_trip.dump(round_trip.load(text), out)
    return out.getvalue()
