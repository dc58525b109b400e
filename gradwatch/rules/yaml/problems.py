"""Problems of a rule file as they are shown: position, code, message, and the line they are in, without secrets.

`Problem` in `gradwatch.errors` draws the line and its caret.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwatch.errors import Problem, RuleFileError
from gradwatch.rules.problem_codes import CODES
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Seq
from gradwatch.runtime.secret_values import asterisks, masked_line, without_password, without_passwords
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


def quoted(text: str) -> str:
    """User's text in a message: single quotes, escapes for what cannot be printed, cut when long, no password."""
    text = without_password(text)
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
        self._secrets: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (begin, end) by file and line
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

    def add(self, mark: Mark, code: str, message: str, hint: str = "") -> None:
        """Report a problem at a place, without passwords; the same one twice counts once."""
        assert code in CODES, code
        message, hint = without_passwords(message), without_passwords(hint)
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
        line = masked_line(line)[: mark.column + 200].rstrip() if mark.column <= MAX_SOURCE_COLUMNS else ""
        width = mark.width or max(1, len(line) - mark.column + 1)
        width = max(1, min(width, len(line) - mark.column + 1))
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

    def hide(self, mark: Mark) -> None:
        """Show no value that stands here, in a line that is shown, whatever else is wrong in it."""
        begin = mark.column - 1
        place = (begin, begin + mark.width if mark.width else len(mark.source.lines[mark.line - 1]))
        self._secrets.setdefault((mark.source.path, mark.line), []).append(place)

    def _masked(self, problem: Problem) -> Problem:
        source = problem.source
        for begin, end in self._secrets.get((problem.path, problem.line), ()):
            source = asterisks(source, begin, end)
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
