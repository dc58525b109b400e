"""Markdown from docstrings and tables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")


def prose(docstring: str | None) -> str:
    """A docstring as paragraphs, each on one line; indented lines, as below `Raises:`, as a list."""
    blocks: list[str] = []
    for paragraph in inspect.cleandoc(docstring or "").split("\n\n"):
        lines: list[str] = []
        for line in paragraph.splitlines():
            begins = re.match(r"    [\w., ]+: ", line)
            if begins or (line.startswith("    ") and not lines):
                lines.append(f"- {escaped(line.strip())}")
            elif lines:
                lines[-1] += f" {escaped(line.strip())}"
            else:
                lines.append(escaped(line))
        listed = [line for line in lines if line.startswith("- ")]
        if len(listed) < len(lines):
            blocks.append(lines[0])
        if listed:
            blocks.append("\n".join(listed))
    return "\n\n".join(blocks)


def escaped(text: str) -> str:
    """Text in which only what stands in backticks is markup."""
    parts = _CODE.split(text)
    return "".join(part if at % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for at, part in enumerate(parts))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell is one line, in which a pipe is no border."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def linked(text: str, target: Callable[[str], str | None]) -> str:
    """Names in backticks as links, where `target` has a page for one."""

    def link(match: re.Match[str]) -> str:
        page = target(match[1])
        return match[0] if page is None else f"[{match[0]}]({page})"

    return re.sub(r"(?<!\[)`([a-z_]+)`(?!\])", link, text)
