"""`gradwatch report [RUN…]`: what happened in a run, as one page that opens offline, as Markdown, or as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradwatch.cli.run_argument import add_directory, add_rank, add_run, chosen_runs
from gradwatch.cli.terminal import Counter, paint
from gradwatch.errors import GradwatchError
from gradwatch.runtime.printable import one_line, printable

if TYPE_CHECKING:
    from gradwatch.report import RunReport

DESCRIPTION = """Was my run fine, and what happened? One page of HTML that opens without a network: the verdict in a
sentence; total norm and loss with incidents, skips and clips; every parameter by depth and step; incidents with their
causes; rules that fired, and rules that never had data.

RUN is a run's folder or one of its journal files; without one, the newest run of --dir. Several runs are laid side by
side. The page is written into the folder of the (first) run, or to --output; Markdown and JSON go to stdout."""
FORMATS = ("html", "md", "json")
STDOUT = "-"
LONGEST_PATH = 4096
_COLOURS = {"healthy": "green", "critical": "red"}


class Output(NamedTuple):
    """Destination and form of a report; `path` None = stdout."""

    form: str
    path: Path | None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch report` to argparse."""
    parser = commands.add_parser(
        "report",
        help="what happened in a run: one page with verdict, charts, incidents, rules",
        description=DESCRIPTION,
    )
    add_run(parser, "runs", nargs="*")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it; - for stdout")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=FORMATS,
        help="default: by the name of the file, else html; md and json go to stdout",
    )
    form.add_argument(
        "--json", action="store_const", const="json", dest="format", help="the same as --format json"
    )
    add_directory(parser)
    add_rank(parser, "show the steps")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Write the report; 0 whatever it says."""
    runs = chosen_runs(arguments)
    output = chosen_output(arguments, runs)
    if output.path is not None:
        check_replaceable(output.path)
    reports = [read(run, arguments.rank) for run in runs]
    content = written(reports, output.form)
    if output.path is None:
        # A surrogate in a name must not end the command, whatever the locale.
        sys.stdout.write(content.encode("utf-8", "replace").decode())
        return 0
    save(output.path, content)
    for one in reports:
        sentence = paint(one.verdict.sentence, _COLOURS.get(one.verdict.state, "yellow"))
        print(f"{printable(one.name)}: {sentence}" if len(reports) > 1 else sentence)
    path = one_line(str(output.path), LONGEST_PATH)
    print(f"{path} ({size(len(content))}; open it in a browser, it needs no network)")
    return 0


def chosen_output(arguments: argparse.Namespace, runs: Sequence[Path]) -> Output:
    """The output that the options ask for."""
    given = arguments.output
    named = Path(given or "").suffix.removeprefix(".").lower()
    form = arguments.format or {"md": "md", "markdown": "md", "json": "json"}.get(named, "html")
    if given == STDOUT or (given is None and form != "html"):
        return Output(form, None)
    if given is not None:
        return Output(form, Path(given))
    folder = runs[0] if runs[0].is_dir() else runs[0].parent
    return Output(form, folder / ("report.html" if len(runs) == 1 else "comparison.html"))


def read(run: Path, rank: int | None) -> RunReport:
    """Read a run, with progress on a terminal."""
    from gradwatch.report import read_run

    with closing(Counter("{:,} steps read")) as count:
        return read_run(run, rank, count)


def written(reports: Sequence[RunReport], form: str) -> str:
    """The report as text."""
    if form == "md":
        from gradwatch.report import markdown_page

        return markdown_page.page(reports)
    if form == "json":
        from gradwatch.report import json_document

        return json_document.text(reports)
    from gradwatch.report import html_page

    return html_page.page(reports)


def check_replaceable(path: Path) -> None:
    """Raise GradwatchError, before minutes of work, where a file of this name will not be written."""
    from gradwatch.runtime.atomic_files import not_replaceable

    if reason := not_replaceable(path):
        raise GradwatchError(f"cannot write {path}: {reason}; name another file: -o FILE")


def save(path: Path, content: str, option: str = ": -o FILE") -> None:
    """Replace the file as a whole. Raises GradwatchError if it cannot be written, which says what names another one."""
    from gradwatch.runtime.atomic_files import write_named

    try:
        write_named(path, content.encode("utf-8", "replace"))
    except OSError as error:
        raise GradwatchError(f"cannot write {path}: {error.strerror}; name another file{option}") from None


def size(count: int) -> str:
    """`180 kB`, `3.4 MB`."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{max(1, round(count / 1e3))} kB"
