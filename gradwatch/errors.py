"""The exception tree: everything gradwatch raises on purpose derives from `GradwatchError`."""

from __future__ import annotations

from typing import NamedTuple


class GradwatchError(Exception):
    """Base of every exception gradwatch raises on purpose."""


class AttachError(GradwatchError):
    """Watching cannot start as asked; the message says what to change.

    Raised before training is touched: not a module, no parameters, attached twice, an action that is not
    available here, or, with `strict_rules`, a rule that matches nothing.
    """


class HookError(GradwatchError):
    """The replacement that the function of a hook (`gradwatch.inspect`) returned does not fit in its place."""


class UnfitRulesError(AttachError):
    """Rules ask for what cannot be carried out on this model, or with these ranks; the message names each."""


class UnmatchedRulesError(UnfitRulesError):
    """Rules or groups match nothing of the model, and `strict_rules` was asked for; the message names each."""


class MissingDependencyError(GradwatchError, ImportError):
    """An integration was imported whose framework is not installed; the message names what to install."""


class TrainingStopped(GradwatchError):  # noqa: N818 (an order, not an error)
    """A rule with `do: [stop]` fired; raised from `optimizer.step()` after the journal was flushed."""


class Problem(NamedTuple):
    """One thing wrong in a rule file.

    `line` and `column` count from 1 and point into `path`; `code` is stable (`GW101`), explained by
    `gradwatch rules explain CODE`; `source` is the text of that line and `width` the number of characters
    that are underlined.
    """

    path: str
    line: int
    column: int
    code: str
    message: str
    source: str = ""
    width: int = 1
    hint: str = ""

    def __str__(self) -> str:
        gutter = " " * len(str(self.line))
        lines = [f"{self.code} {self.message}", f"{gutter}--> {self.path}:{self.line}:{self.column}"]
        if self.source:
            lines += [f"{gutter} |", f"{self.line} | {self.source}", f"{gutter} | {self._underline()}"]
        if self.hint:
            lines.append(f"{gutter} = {self.hint}")
        return "\n".join(lines)

    def _underline(self) -> str:
        """Carets below the characters meant, where a terminal shows them: a wide one takes two columns."""
        start, width = self.column - 1, max(1, self.width)
        if self.source.isascii():
            return " " * start + "^" * width
        from rich.cells import cell_len

        marked = self.source[start : start + width]
        beyond = width - len(marked)
        return " " * cell_len(self.source[:start]) + "^" * max(1, cell_len(marked) + beyond)


class RuleFileError(GradwatchError):
    """A rule file was refused; `problems` holds everything wrong with it, in file order."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__("\n\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type[RuleFileError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)
