"""The syntax tree of a rule file: nodes with positions, and the problems found at them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradwatch.errors import Problem, RuleFileError
from gradwatch.rules.problem_codes import CODES
from gradwatch.runtime.spelling import closest

MAX_PROBLEMS = 100
MAX_SUGGESTIONS = 20
MAX_SHOWN = 60
MAX_SOURCE_COLUMNS = 400
SYNONYMS = {
    "action": "do",
    "actions": "do",
    "column": "of",
    "error": "critical",
    "fatal": "critical",
    "global": "total",
    "level": "severity",
    "max": "max_norm",
    "metric": "of",
    "notify": "sinks",
    "patience": "for",
    "per_group": "groups",
    "stat": "of",
    "warn": "warning",
}
"""Words of other tools, and what they are called here."""


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


def quoted(text: str) -> str:
    """User's text inside a message: single quotes, escapes for what cannot be printed, cut when long."""
    cut = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut) + "'"


def shown(node: Node) -> str:
    """Text of a node, for "found …"."""
    if isinstance(node, Map):
        return "a map"
    if isinstance(node, Seq):
        return "a list"
    if node.value is None:
        return "nothing"
    if isinstance(node.value, str):
        return f"the text {quoted(node.text)}"
    return node.text


def _visible(line: str) -> str:
    """The source line with one printable character per character, so that the caret stays true."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "\ufffd" for c in line)


class Problems:
    """Collects everything wrong, once each; gives suggestions while they are affordable."""

    def __init__(self) -> None:
        self._secrets: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (begin, width) by file and line
        self._found: dict[tuple[str, int, int, str, str], Problem] = {}
        self._files: dict[str, int] = {}
        # What was validated already, by identity of the node (kept alive here), and what became of it.
        self.checked: dict[tuple[int, type], tuple[Node, Any]] = {}
        self._suggestions = 0
        self.omitted = 0
        self.reported = 0
        """How often `add` was called."""

    def __len__(self) -> int:
        return len(self._found)

    def omit(self) -> None:
        """Count a problem that is not kept: there are too many."""
        self.omitted += 1

    @property
    def full(self) -> bool:
        """True if further problems are only counted."""
        return len(self._found) >= MAX_PROBLEMS

    def file(self, path: str) -> None:
        """Files are reported in the order in which they are announced here."""
        self._files.setdefault(path, len(self._files))

    def add(self, mark: Mark, code: str, message: str, hint: str = "", secret: bool = False) -> None:
        """Report a problem at a place; the same one twice counts once. A `secret` value is not shown."""
        assert code in CODES, code
        self.reported += 1
        path = mark.source.path
        self.file(path)
        key = (path, mark.line, mark.column, code, message)
        if key in self._found:
            return
        if self.full:
            self.omit()
            return
        line = mark.source.lines[mark.line - 1] if mark.line <= len(mark.source.lines) else ""
        line = line[: mark.column + 200].rstrip() if mark.column <= MAX_SOURCE_COLUMNS else ""
        width = mark.width or max(1, len(line) - mark.column + 1)
        width = max(1, min(width, len(line) - mark.column + 1))
        if secret:
            self._secrets.setdefault((path, mark.line), []).append((mark.column - 1, width))
        self._found[key] = Problem(path, mark.line, mark.column, code, message, _visible(line), width, hint)

    def closest(self, word: str, known: Iterable[str]) -> str:
        """The known word most like `word`, or "" (also when so much is wrong that a reader needs no
        suggestions).
        """
        if self._suggestions >= 2 * MAX_SUGGESTIONS or len(word) > MAX_SHOWN:
            return ""
        self._suggestions += 1
        options = list(known)
        if SYNONYMS.get(word.lower()) in options:
            return SYNONYMS[word.lower()]
        return closest(word, options)

    def meant(self, word: str, known: Iterable[str]) -> str:
        """ "; did you mean 'x'?", or ""."""
        close = self.closest(word, known)
        return f"; did you mean '{close}'?" if close else ""

    def _masked(self, problem: Problem) -> Problem:
        """Mask secrets in the line that is shown, whatever else is wrong in it."""
        source = problem.source
        for begin, width in self._secrets.get((problem.path, problem.line), ()):
            hidden = len(source[begin : begin + width])
            source = source[:begin] + "*" * hidden + source[begin + width :]
        return problem._replace(source=source)

    def error(self) -> RuleFileError:
        """Everything found, by file, line and column."""
        ordered = sorted(
            map(self._masked, self._found.values()),
            key=lambda p: (self._files[p.path], p.line, p.column, p.code),
        )
        if self.omitted:
            last = ordered[-1]
            message = f"… and {self.omitted:,} more problems; fix these first"
            ordered.append(Problem(last.path, last.line, last.column, "GW009", message))
        return RuleFileError(tuple(ordered))
