"""YAML text -> a tree of nodes with line and column, or problems. Nothing here depends on rules.

The text is read as YAML 1.2 through ruamel's event API: nothing is ever constructed from a tag, and anchors,
aliases, tags, directives, merge keys, duplicate keys and several documents are refused by position. Work is
bounded before it is done: bytes, lines, nodes and depth, all checked while events arrive, so a hostile file
costs no more than an honest one of the same size.
"""

from __future__ import annotations

import codecs
from functools import cached_property
from typing import Any

from gradwatch.rules.yaml.line_and_column import LineReader, mark_at, mark_of_error, mark_of_reader
from gradwatch.rules.yaml.node_builder import NodeBuilder
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Source
from gradwatch.rules.yaml.problems import Problems, shown
from gradwatch.rules.yaml.size_limits import MAX_BYTES, MAX_DEPTH, too_large, within_limits
from gradwatch.runtime.interruption import not_ours
from gradwatch.runtime.warning_filters import filters_kept

with filters_kept():  # ruamel adds warning filters of its own when it is imported
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError
    from ruamel.yaml.parser import Parser
    from ruamel.yaml.scanner import Scanner, ScannerError

_NOTES = {
    "cannot start any token": "quote the text if it is meant literally",
    "mapping values are not allowed": "text that holds ': ' needs quotes; is the indentation right?",
    "could not find expected ':'": "a key needs ': ' and a value after it",
}


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
        too_large(Mark(Source(path, ""), 1, 1), f"{MAX_BYTES:,} bytes", problems)
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        text = data.decode("utf-8-sig", "replace")
        problems.add(
            mark_at(Source(path, text), text, len(before)),
            "GW002",
            f"not UTF-8 text: {error.reason}",
            "save the file as UTF-8",
        )
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
    if not within_limits(text, source, problems):
        return None
    builder = NodeBuilder(source, problems)
    yaml = YAML(typ="safe", pure=True)
    yaml.Reader, yaml.Scanner, yaml.Parser = LineReader, _Scanner, _Parser
    try:
        complete = all(builder.feed(event) for event in yaml.parse(text))
    except MarkedYAMLError as error:
        problems.add(mark_of_error(source, error), *_syntax(error))
        return None
    except Exception as error:  # ruamel's own faults on unforeseen input; the place is still known
        if not_ours(error):
            raise
        at = mark_of_reader(source, yaml.reader)
        problems.add(at, "GW005", f"not valid YAML ({type(error).__name__})")
        return None
    return _top(builder.root, source, problems) if complete else None


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
