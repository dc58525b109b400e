"""The syntax tree of a rule file: nodes with positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Source:
    """The text of one file, by lines; `path` is spelled as the user spelled it."""

    __slots__ = ("lines", "path")

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.lines = text.split("\n")


class Mark(NamedTuple):
    """A place: line and column count from 1; `width` characters are underlined (0 = to the end of the
    line).
    """

    source: Source
    line: int
    column: int
    width: int = 1

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}"


@dataclass(slots=True)
class Scalar:
    """A leaf: `value` as YAML 1.2 reads it, `text` as written, `plain` = without quotes."""

    mark: Mark
    value: Any
    text: str
    plain: bool


@dataclass(slots=True)
class Seq:
    """A list; `dropped` = an item was refused and left out."""

    mark: Mark
    items: list[Node] = field(default_factory=list)
    dropped: bool = False

    def item_dropped(self) -> None:
        """Note that an item was refused and left out."""
        self.dropped = True

    def underline(self, width: int) -> None:
        """Underline so many characters of its first line in messages: all of a list that ends on that line."""
        self.mark = self.mark._replace(width=width)


class Entry(NamedTuple):
    """A key's place and its value."""

    key: Mark
    node: Node


@dataclass(slots=True)
class Map:
    """A map in file order; `dropped` are the keys whose values were refused and left out."""

    mark: Mark
    entries: dict[str, Entry] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    def underline(self, width: int) -> None:
        """Underline so many characters of its first line in messages: all of a map that ends on that line."""
        self.mark = self.mark._replace(width=width)

    def set(self, key: str, mark: Mark, node: Node) -> None:
        """Put an entry; an existing one keeps its place in the order."""
        self.entries[key] = Entry(mark, node)

    def get(self, key: str) -> Node | None:
        """The value of `key`, or None."""
        entry = self.entries.get(key)
        return None if entry is None else entry.node

    def key_mark(self, key: str) -> Mark:
        """Position of `key`, or of the map where there is no such key."""
        entry = self.entries.get(key)
        return self.mark if entry is None else entry.key


Node = Scalar | Seq | Map


def data(node: Node) -> Any:
    """The node as plain dict, list and scalars."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Seq):
        return [data(item) for item in node.items]
    return {key: data(entry.node) for key, entry in node.entries.items()}


def without(node: Map, key: str) -> Map:
    """A copy of the map without one of its keys."""
    rest = {name: entry for name, entry in node.entries.items() if name != key}
    return Map(node.mark, rest, set(node.dropped))
