"""The text of a rule file with even indentation: only spaces between tokens change, and no line break.

Nothing is written anew from what the file means: every scalar, comment and line end is copied as it is spelled. Where a
token begins a line, its column follows from the block maps and lists around it; lines that go on inside `{…}`, `[…]` or
a scalar move with what they are aligned to.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Any, NamedTuple

from gradwatch.runtime.warning_filters import filters_kept

with filters_kept():  # ruamel adds warning filters of its own when it is imported
    from ruamel.yaml import YAML
    from ruamel.yaml import tokens as kinds

_BYTE_ORDER_MARK = "\ufeff"
_BLANKS = " \t"
_STEP = 2
_MAP, _LIST, _LIST_IN_COLUMN_OF_KEY = range(3)
_FLOW_STARTS = (kinds.FlowMappingStartToken, kinds.FlowSequenceStartToken)
_FLOW_ENDS = (kinds.FlowMappingEndToken, kinds.FlowSequenceEndToken)
_AT_THE_MARGIN = (kinds.DocumentStartToken, kinds.DocumentEndToken, kinds.StreamEndToken)


def formatted(text: str) -> str:
    """`text`, which must have been accepted as a rule file: two columns a level, four for lists, spaces one by one."""
    mark = text[: text.startswith(_BYTE_ORDER_MARK)]
    body = text.removeprefix(mark)
    lines = _Layout(body.replace("\r\n", "\n")).lines()
    ends = re.findall(r"\r?\n", body)
    return mark + "".join(line + end for line, end in zip_longest(lines, ends, fillvalue=""))


class _Level(NamedTuple):
    """A block map or list, with its column as found and as it is to be."""

    kind: int
    old: int
    new: int


class _Start(NamedTuple):
    """Start of something that may go on in further lines: its column as found, how far it and its line move."""

    column: int
    moved: int
    line_moved: int

    def shifted(self, column: int, least: int) -> int:
        """The new column of a line that goes on: one beyond the start is aligned to that, any other to the line."""
        return max(least, column + (self.moved if column > self.column else self.line_moved))


class _Levels:
    """The block maps and lists around a token."""

    def __init__(self) -> None:
        self.open: list[_Level] = []
        self._begins: int | None = None
        self._begins_entry = False

    @property
    def content(self) -> int:
        """The new column of what stands in a line of its own below the innermost level."""
        return self.open[-1].new + _STEP if self.open else 0

    @property
    def columns(self) -> dict[int, int]:
        """The new column of each level by that found."""
        return {level.old: level.new for level in self.open}

    def meet(self, token: Any) -> None:
        """Take a token of a block: levels begin and end at tokens that mostly have no width."""
        if isinstance(token, kinds.BlockMappingStartToken | kinds.BlockSequenceStartToken):
            self._begins = _MAP if isinstance(token, kinds.BlockMappingStartToken) else _LIST
        elif isinstance(token, kinds.BlockEndToken):
            self._leave_list_in_column_of_key()
            self.open.pop()
        elif isinstance(token, kinds.KeyToken | kinds.ValueToken | kinds.BlockEntryToken):
            self._meet_entry(token)

    def _meet_entry(self, token: Any) -> None:
        column, of_list = token.start_mark.column, isinstance(token, kinds.BlockEntryToken)
        self._begins_entry = True
        if self._begins is not None or not self.open:
            return
        top = self.open[-1]
        if not of_list and column == top.old:
            self._leave_list_in_column_of_key()
        elif of_list and top.kind == _MAP:  # no token says that it begins
            self.open.append(_Level(_LIST_IN_COLUMN_OF_KEY, column, top.new + _STEP))

    def _leave_list_in_column_of_key(self) -> None:
        if self.open and self.open[-1].kind == _LIST_IN_COLUMN_OF_KEY:
            self.open.pop()

    def column_of_line(self) -> int:
        """The new column of the token, which begins a line."""
        at_level = self._begins_entry and self._begins is None and self.open
        return self.open[-1].new if at_level else self.content

    def placed(self, old: int, new: int) -> None:
        """The token, which stood at `old`, stands at `new`; so does the level that begins with it."""
        if self._begins is not None:
            self.open.append(_Level(self._begins, old, new))
        self._begins, self._begins_entry = None, False


class _Layout:
    """The tokens of a text, one after another, with the spaces that belong between them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._done = [""]
        self._levels = _Levels()
        self._levels_before: dict[int, int] = {}
        self._flows: list[_Start] = []
        self._line_moved = 0

    def lines(self) -> list[str]:
        """All lines, without their ends."""
        end = 0
        for token in YAML(typ="safe", pure=True).scan(self._text):
            start, old = token.start_mark.index, token.start_mark.column
            if not self._flows:
                self._levels.meet(token)
            if token.end_mark.index == start and not isinstance(token, kinds.StreamEndToken):
                continue
            self._space(token, end, self._text[end:start].split("\n"))
            new = len(self._done[-1])
            self._levels.placed(old, new)
            self._levels_before = self._levels.columns
            self._copy(
                token, self._text[start : token.end_mark.index], _Start(old, new - old, self._line_moved)
            )
            end = token.end_mark.index
        return self._done

    def _space(self, token: Any, end: int, parts: list[str]) -> None:
        """Write what stands between the last token, which ended at `end`, and this one, each line of it a part."""
        last = isinstance(token, kinds.StreamEndToken)
        column = end - self._text.rfind("\n", 0, end) - 1
        if column == 0:  # the last token has ended with its line, or there is none yet
            self._done.pop()
        elif part := parts.pop(0).strip(_BLANKS):
            self._comment_behind(part, end, column)
        elif not parts and not last and self._text[end] in _BLANKS:
            self._done[-1] += " "
        if parts and last:
            self._own_lines(parts, {0: 0})
        elif parts:
            found, new = len(parts.pop()), self._column_of_line(token)
            self._line_moved = new - found
            self._own_lines(parts, {0: 0, **self._levels.columns, found: new})
            self._done.append(" " * new)

    def _comment_behind(self, comment: str, end: int, column: int) -> None:
        """Write a comment behind a token: in the column that it has, or one space from the token, if it was so."""
        wanted = column + self._text.index("#", end) - end
        spaces = 1 if wanted == column + 1 else max(1, wanted - len(self._done[-1]))
        self._done[-1] += " " * spaces + comment

    def _own_lines(self, parts: list[str], columns: dict[int, int]) -> None:
        """Write empty lines and comments: in the column of a level around them, or moved as the next line is."""
        columns = {**self._levels_before, **columns}
        for part in parts:
            column = len(part) - len(part.lstrip(_BLANKS))
            new = columns.get(column, max(0, column + self._line_moved))
            self._done.append(" " * new + part.strip(_BLANKS) if part.strip(_BLANKS) else "")

    def _column_of_line(self, token: Any) -> int:
        if isinstance(token, _AT_THE_MARGIN):
            return 0
        if not self._flows:
            return self._levels.column_of_line()
        least = self._levels.content - (_STEP if isinstance(token, _FLOW_ENDS) else 0)
        return self._flows[-1].shifted(token.start_mark.column, max(0, least))

    def _copy(self, token: Any, text: str, start: _Start) -> None:
        """Write a token as it is spelled, with the lines in which it goes on moved."""
        first, *rest = text.split("\n")
        self._done[-1] += first
        if isinstance(token, _FLOW_STARTS):
            self._flows.append(start)
        elif isinstance(token, _FLOW_ENDS):
            self._flows.pop()
        elif rest and token.style in ("|", ">"):
            self._done += self._block_text(first, rest)
        else:
            for line in rest:
                column = len(line) - len(line.lstrip(_BLANKS))
                new = start.shifted(column, self._levels.content)
                self._done.append(" " * new + line[column:] if line[column:] else "")

    def _block_text(self, header: str, lines: list[str]) -> list[str]:
        """The lines of a scalar that begins with `|` or `>`, further in or out as a whole."""
        given = re.match(r"[|>][+-]?([1-9])", header)
        old = min(
            (len(line) - len(line.lstrip(" ")) for line in lines if line.strip(" ")), default=len(max(lines))
        )
        new = self._levels.content
        if given:
            around = self._levels.open[-1]
            old, new = around.old + int(given[1]), around.new + int(given[1])
        return [" " * new + line[old:] if line[old:] else "" for line in lines]
