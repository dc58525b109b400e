"""Line and column of everything in a rule file: of each key and value, of what is not YAML, of a character refused."""

from __future__ import annotations

from typing import Any

from gradwatch.rules.yaml.nodes import Mark, Source
from gradwatch.runtime.warning_filters import filters_kept

with filters_kept():  # ruamel adds warning filters of its own when it is imported
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.events import CollectionStartEvent
    from ruamel.yaml.reader import Reader


class LineReader(Reader):
    """ruamel's reader without its per-character loop: newlines are '\\n' only, and all text is in memory."""

    def peek(self, index: int = 0) -> str:
        return self.buffer[self.pointer + index]

    def forward(self, length: int = 1) -> None:
        start = self.pointer
        end = self.pointer = start + length
        self.index += length
        breaks = self.buffer.count("\n", start, end)
        if breaks:
            self.line += breaks
            self.column = end - 1 - self.buffer.rfind("\n", start, end)
        else:
            self.column += length


def mark_of_event(source: Source, event: Any) -> Mark:
    """Place of a key or value, or of the first character of a map or list."""
    start, end = event.start_mark, event.end_mark
    width = end.column - start.column if end.line == start.line else 0
    if isinstance(event, CollectionStartEvent):
        width = 0 if event.flow_style else 1
    return Mark(source, start.line + 1, start.column + 1, width)


def mark_of_error(source: Source, error: MarkedYAMLError) -> Mark:
    """Place at which the text is not YAML."""
    mark = error.problem_mark or error.context_mark
    return Mark(source, mark.line + 1, mark.column + 1) if mark else Mark(source, 1, 1)


def mark_of_reader(source: Source, reader: Any) -> Mark:
    """Place up to which ruamel has read."""
    return Mark(source, reader.line + 1, reader.column + 1)


def mark_at(source: Source, text: str, index: int) -> Mark:
    """Place of a character of the text."""
    line_start = text.rfind("\n", 0, index) + 1
    return Mark(source, text.count("\n", 0, index) + 1, index - line_start + 1)
