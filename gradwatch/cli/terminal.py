"""What a terminal gets: colour where it is wanted, tables, errors on stderr.

https://no-color.org: a non-empty NO_COLOR means none, whatever the terminal; a pipe never gets any.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from gradwatch.errors import Problem

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")


def colourful(stream: TextIO) -> bool:
    """Whether escape codes may be written to `stream`."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """`text` in one of bold, dim, red, green, yellow, cyan where `stream` (default stdout) shows colour."""
    if not colourful(stream or sys.stdout):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def complain(text: str) -> None:
    """One error message on stderr; nowhere where that is closed."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def framed(problem: Problem) -> str:
    """The problem with its source line and caret, the code in red on a terminal."""
    code, rest = str(problem).split(" ", 1)
    return f"{paint(code, 'red', sys.stderr)} {rest}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Left-aligned columns two spaces apart; cells may already be painted."""
    cells = [[paint(title, "bold") for title in header], *rows]
    widths = [max(width(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell + " " * (wide - width(cell)) for cell, wide in zip(row, widths, strict=True)]
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def width(text: str) -> int:
    """Columns `text` takes on a terminal, escape codes not counted."""
    return len(unpainted(text))


def unpainted(text: str) -> str:
    """`text` without escape codes; cut a line only in this form, or its colour would run on."""
    return _ESCAPE.sub("", text)


def plural(count: int, noun: str) -> str:
    """`1 rule`, `2 rules`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
