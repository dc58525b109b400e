"""YAML text -> a tree of nodes that know where they stand, or problems. No rule is known here.

The text is read as YAML 1.2 through ruamel's event API: nothing is ever constructed from a tag, and anchors,
aliases, tags, directives, merge keys, duplicate keys and several documents are refused by position. Work is
bounded before it is done: bytes, lines, nodes and depth, all checked while events arrive, so a hostile file
costs no more than an honest one of the same size.
"""

from __future__ import annotations

import codecs
import re
from enum import Enum
from functools import cached_property
from typing import Any

from gradwatch.rules.yaml.nodes import Map, Mark, Node, Problems, Scalar, Seq, Source, quoted, shown
from gradwatch.rules.yaml.scalars import resolve
from gradwatch.runtime.imports import filters_kept

with filters_kept():  # ruamel adds warning filters of its own when it is imported
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.events import (
        AliasEvent,
        CollectionStartEvent,
        DocumentStartEvent,
        MappingEndEvent,
        MappingStartEvent,
        ScalarEvent,
        SequenceEndEvent,
    )
    from ruamel.yaml.parser import Parser
    from ruamel.yaml.reader import Reader
    from ruamel.yaml.scanner import Scanner, ScannerError

MAX_BYTES = 32 * 1024
MAX_LINES = 1_200
MAX_NODES = 1_200
MAX_DEPTH = 32

# What YAML calls a line break in some version, or what an editor shows as nothing: never meant in a rule
# file.
_FORBIDDEN = re.compile(
    "[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_NOTES = {
    "cannot start any token": "quote the text if it is meant literally",
    "mapping values are not allowed": "text that holds ': ' needs quotes; is the indentation right?",
    "could not find expected ':'": "a key needs ': ' and a value after it",
}


class _Reader(Reader):
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


class _Scanner(Scanner):
    """ruamel's scanner, refusing what would cost unbounded work: 16,384 '[' take it 45 seconds otherwise."""

    @cached_property
    def reader(self) -> Any:  # a property of ruamel's, looked up for every character
        return self.loader.reader

    def need_more_tokens(self) -> bool:
        if self.tokens and not self.possible_simple_keys:
            return False  # what ruamel's finds out by two walks over an empty dict
        return bool(super().need_more_tokens())

    def save_possible_simple_key(self) -> None:
        if self.flow_level > MAX_DEPTH:
            raise ScannerError(None, None, f"nested deeper than {MAX_DEPTH}", self.reader.get_mark())
        super().save_possible_simple_key()

    def fetch_directive(self) -> None:
        raise ScannerError(None, None, "a rule file takes no % directives", self.reader.get_mark())


class _Parser(Parser):
    """ruamel's parser with its scanner looked up once."""

    @cached_property
    def scanner(self) -> Any:
        return self.loader.scanner


def decode(data: bytes, path: str, problems: Problems) -> str | None:
    """The text of a file; None, and a problem, when it is too large or not UTF-8."""
    if len(data) > MAX_BYTES + len(codecs.BOM_UTF8):
        _too_large(Mark(Source(path, ""), 1, 1), f"{MAX_BYTES:,} bytes", problems)
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        source = Source(path, data.decode("utf-8-sig", "replace"))
        line = before.count("\n") + 1
        mark = Mark(source, line, len(before) - (before.rfind("\n") + 1) + 1)
        problems.add(mark, "GW002", f"not UTF-8 text: {error.reason}", "save the file as UTF-8")
        return None


def parse(text: str, path: str, problems: Problems) -> Map | None:
    """The document's top-level map, or None (with a problem) when there is none to be had.

    It is not to be changed: the same text of the same file is read once. To read the default pack takes as long as the
    rest of what makes a watch, and a process with many trainings makes many.
    """
    known = _read.get((path, text))
    if known is None:
        before = problems.reported
        known = _parse(text, path, problems)
        if known is not None and problems.reported == before:
            _keep((path, text), known)
    return known


_MOST_READ = 4
_read: dict[tuple[str, str], Map] = {}
"""The documents read last in which nothing was wrong, by path and text."""


def _keep(key: tuple[str, str], document: Map) -> None:
    global _read
    # A new dict: another thread may be reading the old one.
    _read = {**dict([*_read.items()][1 - _MOST_READ :]), key: document}


def _parse(text: str, path: str, problems: Problems) -> Map | None:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    source = Source(path, text)
    if not _bounded(text, source, problems):
        return None
    builder = _Builder(source, problems)
    yaml = YAML(typ="safe", pure=True)
    yaml.Reader, yaml.Scanner, yaml.Parser = _Reader, _Scanner, _Parser
    try:
        complete = all(builder.feed(event) for event in yaml.parse(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Mark(source, mark.line + 1, mark.column + 1) if mark else Mark(source, 1, 1)
        problems.add(at, *_syntax(error))
        return None
    except Exception as error:  # ruamel's own faults on unforeseen input; the place is still known
        at = Mark(source, yaml.reader.line + 1, yaml.reader.column + 1)
        problems.add(at, "GW005", f"not valid YAML ({type(error).__name__})")
        return None
    return _top(builder.root, source, problems) if complete else None


def _too_large(at: Mark, bound: str, problems: Problems) -> None:
    problems.add(at, "GW003", f"larger than {bound}", "split the file, and name the parts in `extends:`")


def _bounded(text: str, source: Source, problems: Problems) -> bool:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        _too_large(Mark(source, 1, 1), f"{MAX_BYTES:,} bytes", problems)
        return False
    if len(source.lines) > MAX_LINES + 1:
        _too_large(Mark(source, MAX_LINES + 1, 1), f"{MAX_LINES:,} lines", problems)
        return False
    found = [(m.start(), m.group()) for m in _FORBIDDEN.finditer(text)]
    for start, character in found[:10]:
        line = text.count("\n", 0, start) + 1
        mark = Mark(source, line, start - (text.rfind("\n", 0, start) + 1) + 1)
        problems.add(mark, "GW004", f"character U+{ord(character):04X} is not allowed here", "delete it")
    return not found


def _syntax(error: MarkedYAMLError) -> tuple[str, str, str]:
    problem = str(error.problem or "not valid YAML")
    if "deeper than" in problem:
        return "GW003", problem, "no rule needs this depth"
    if "'\\t'" in problem:
        return "GW005", "a tab where YAML wants spaces", "indent with spaces"
    if "<document start>" in problem:
        return "GW005", "text after the end of the document, or indentation that fits no line above", ""
    context = f" {error.context}" if error.context else ""
    note = next((note for start, note in _NOTES.items() if start in problem), "")
    return "GW005", f"not valid YAML: {problem}{context}", note


def _top(root: Node | None, source: Source, problems: Problems) -> Map | None:
    if isinstance(root, Map):
        return root
    if root is None or (isinstance(root, Scalar) and root.value is None):
        problems.add(Mark(source, 1, 1), "GW006", "the file is empty", "it starts with `version: 1`")
    else:
        problems.add(
            root.mark, "GW006", f"a rule file is a map of keys, not {shown(root)}", "start with `version: 1`"
        )
    return None


class _Refused(Enum):
    """Stands for a key that was refused: its value is left out as well."""

    KEY = 0


class _Builder:
    """Puts events together to nodes, without recursion; refuses what a rule file may not hold."""

    def __init__(self, source: Source, problems: Problems) -> None:
        self.source, self.problems = source, problems
        self.root: Node | None = None
        self.open: list[Map | Seq] = []
        self.keys: list[Scalar | _Refused | None] = []  # per open map, the key that waits for its value
        self.skipped = 0  # > 0: inside a collection that is being left out
        self.nodes = self.documents = self.depth = 0

    def feed(self, event: Any) -> bool:
        """Take one event; False when reading must end here."""
        if isinstance(event, DocumentStartEvent):
            return self._document(event)
        if isinstance(event, (MappingEndEvent, SequenceEndEvent)):
            self._close(event)
        elif isinstance(event, (ScalarEvent, CollectionStartEvent, AliasEvent)):
            return self._node(event)
        return True

    def _document(self, event: Any) -> bool:
        self.documents += 1
        if self.documents > 1:
            self.problems.add(
                self._mark(event), "GW007", "a second document; a rule file holds one", "delete '---'"
            )
        return self.documents == 1

    def _node(self, event: Any) -> bool:
        mark = self._mark(event)
        self.nodes += 1
        starts = isinstance(event, CollectionStartEvent)
        if self.nodes > MAX_NODES:
            _too_large(mark, f"{MAX_NODES:,} keys and values", self.problems)
            return False
        if starts and self.depth >= MAX_DEPTH:
            self.problems.add(mark, "GW003", f"nested deeper than {MAX_DEPTH}", "no rule needs this depth")
            return False
        self.depth += starts
        if self.skipped:
            self.skipped += starts
            return True
        self._plain(event, mark)
        if isinstance(event, AliasEvent):
            self.problems.add(mark, "GW007", f"alias *{event.anchor}; write the value out", "")
            self._drop()
        elif isinstance(event, ScalarEvent):
            self._scalar(event, mark)
        elif self._awaits_key():
            self.problems.add(mark, "GW007", "a key must be a single word, not a map or a list", "")
            self.skipped = 1
        else:
            self.open.append(Map(mark) if isinstance(event, MappingStartEvent) else Seq(mark))
            self.keys.append(None)
        return True

    def _plain(self, event: Any, mark: Mark) -> None:
        """Anchors and tags are reported and otherwise ignored."""
        if getattr(event, "anchor", None) and not isinstance(event, AliasEvent):
            self.problems.add(
                mark, "GW007", f"anchor &{event.anchor}; anchors are not used in rule files", ""
            )
        if getattr(event, "ctag", None) is not None:
            self.problems.add(mark, "GW007", f"tag {event.tag}; tags are not used in rule files", "delete it")

    def _scalar(self, event: Any, mark: Mark) -> None:
        text = str(event.value)
        if _FORBIDDEN.search(text):
            self.problems.add(
                mark, "GW004", "the text holds a control character or a surrogate", "delete the escape"
            )
            self._drop()
            return
        plain = event.style is None
        self._put(Scalar(mark, resolve(text) if plain else text, text, plain))

    def _close(self, event: Any) -> None:
        self.depth -= 1
        if self.skipped:
            self.skipped -= 1
            if not self.skipped:
                self._drop()
            return
        node = self.open.pop()
        self.keys.pop()
        if event.end_mark.line + 1 == node.mark.line and event.end_mark.column >= node.mark.column:
            node.mark = Mark(
                self.source, node.mark.line, node.mark.column, event.end_mark.column + 1 - node.mark.column
            )
        self._put(node)

    def _awaits_key(self) -> bool:
        return bool(self.open) and isinstance(self.open[-1], Map) and self.keys[-1] is None

    def _put(self, node: Node) -> None:
        """The node is complete: it is the root, an item, a key, or the value of the key that waits."""
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        if isinstance(parent, Seq):
            parent.items.append(node)
        elif (key := self.keys[-1]) is None:
            assert isinstance(node, Scalar)
            self.keys[-1] = node
        else:
            self.keys[-1] = None
            if key is not _Refused.KEY:
                self._entry(parent, key, node)

    def _entry(self, parent: Map, key: Scalar, node: Node) -> None:
        if key.plain and key.text == "<<":
            self.problems.add(key.mark, "GW007", "merge key <<; use `extends:` or `defaults:`", "")
        elif key.text in parent.entries:
            first = parent.entries[key.text].key.line
            message = f"duplicate key {quoted(key.text)}; first on line {first}"
            self.problems.add(key.mark, "GW008", message, "keep one of them")
        else:
            parent.set(key.text, key.mark, node)

    def _drop(self) -> None:
        """Leave out a node that was refused, without a second complaint that it is missing."""
        if not self.open:
            return
        parent = self.open[-1]
        if isinstance(parent, Seq):
            parent.dropped = True
        elif (key := self.keys[-1]) is None:
            self.keys[-1] = _Refused.KEY
        else:
            if key is not _Refused.KEY:
                parent.dropped.add(key.text)
            self.keys[-1] = None

    def _mark(self, event: Any) -> Mark:
        start, end = event.start_mark, event.end_mark
        line, column = start.line + 1, start.column + 1
        width = end.column - start.column if end.line == start.line else 0
        if isinstance(event, CollectionStartEvent):
            width = 0 if event.flow_style else 1
        return Mark(self.source, line, column, width)
