"""Limits of a rule file: bytes, lines, nodes, depth, and characters that are never meant."""

from __future__ import annotations

import re

from gradwatch.rules.yaml.line_and_column import mark_at
from gradwatch.rules.yaml.nodes import Mark, Source
from gradwatch.rules.yaml.problems import Problems

MAX_BYTES = 32 * 1024
MAX_LINES = 1_200
MAX_NODES = 1_600
MAX_DEPTH = 32

# What YAML calls a line break in some version, or what an editor shows as nothing: never meant in a rule
# file.
FORBIDDEN = re.compile(
    "[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


def too_large(at: Mark, bound: str, problems: Problems) -> None:
    """Report that a rule file is larger than a bound."""
    problems.add(at, "GW003", f"larger than {bound}", "split the file, and name the parts in `extends:`")


def within_limits(text: str, source: Source, problems: Problems) -> bool:
    """True if a text is small enough to be read, and holds no forbidden character; else that is reported."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        too_large(Mark(source, 1, 1), f"{MAX_BYTES:,} bytes", problems)
        return False
    if len(source.lines) > MAX_LINES + 1:
        too_large(Mark(source, MAX_LINES + 1, 1), f"{MAX_LINES:,} lines", problems)
        return False
    found = [(m.start(), m.group()) for m in FORBIDDEN.finditer(text)]
    for start, character in found[:10]:
        mark = mark_at(source, text, start)
        problems.add(mark, "GW004", f"character U+{ord(character):04X} is not allowed here", "delete it")
    return not found
