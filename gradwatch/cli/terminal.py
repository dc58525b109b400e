"""The terminal: colour where it is wanted, tables, progress, errors on stderr. rich draws, and is imported only then.

https://no-color.org: a non-empty NO_COLOR means none, whatever the terminal; a pipe never gets any.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from gradwatch.errors import Problem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

PATIENCE = 1.0
"""Seconds that a command may take before it shows how far it is."""
_UNBOUNDED = 1 << 20
"""Columns: wider than any table, so that rich neither wraps nor cuts one."""


def colourful(stream: TextIO) -> bool:
    """True if escape codes may be written to `stream`."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def redrawable(stream: TextIO | None) -> bool:
    """True if a line of `stream` can be drawn over: a terminal with a cursor, coloured or not."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def console(stream: TextIO, width: int | None = None) -> Console:
    """A rich console on `stream`, `width` columns wide (None: as the terminal), that adds no markup and no colours."""
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=redrawable(stream),
        color_system="standard" if colourful(stream) else None,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
    )


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """`text` in a style of rich ("bold", "red", …) where `stream` (default stdout) shows colour."""
    if not colourful(stream or sys.stdout):
        return text
    from rich.style import Style

    return Style.parse(style).render(text)


def complain(text: str) -> None:
    """One error message on stderr; nowhere where that is closed."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def framed(problem: Problem) -> str:
    """The problem with its source line and caret, the code in red on a terminal."""
    code, rest = str(problem).split(" ", 1)
    return f"{paint(code, 'red', sys.stderr)} {rest}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Left-aligned columns two spaces apart, never cut or wrapped; no `header`, no such row. Cells may be painted."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(header), header_style="")
    for title in header or rows[0]:
        drawn.add_column(Text.from_ansi(paint(title, "bold")), no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text.from_ansi, row))
    target = console(sys.stdout, _UNBOUNDED)
    with target.capture() as captured:
        target.print(drawn)
    return "\n".join(f"{indent}{line}".rstrip() for line in captured.get().splitlines())


class Counter:
    """A line on stderr that says how far something is: drawn on a terminal once it has taken PATIENCE seconds.

    `form` is a format string for the numbers of each call: "{:,} steps read". `close` takes the line away.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._began: float | None = None
        self._shown: Status | None = None

    def __call__(self, *numbers: int) -> None:
        """Show `numbers`; the first call, and the first after `close`, starts the clock."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now - self._began < PATIENCE or not redrawable(sys.stderr):
            return
        if self._shown is None:
            from rich.status import Status

            self._shown = Status("", console=console(sys.stderr))
            self._shown.start()
        self._shown.update(self._form.format(*numbers))

    def close(self) -> None:
        """Take the line away. Idempotent."""
        if self._shown is not None:
            self._shown.stop()
        self._began = self._shown = None
