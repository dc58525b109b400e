"""Runs on disk, as commands name them: a folder, a journal file, or the newest there is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from gradwatch.errors import GradwatchError

ADVICE = "name the folder of a run, give --dir, or make a run: gradwatch run -- python train.py"


def default_directory() -> str:
    """The folder of all runs: GRADWATCH_DIR, else ./gradwatch-runs."""
    from gradwatch.session.settings import DEFAULT_DIR

    return os.environ.get("GRADWATCH_DIR") or DEFAULT_DIR


def add_run(parser: argparse.ArgumentParser, name: str, nargs: str) -> None:
    """Describe the argument `RUN` to argparse."""
    parser.add_argument(name, nargs=nargs, metavar="RUN", help="folder of a run, or a journal file")
    if nargs != "+":
        parser.add_argument("--run", dest="named", metavar="RUN", help="the same, as `explain` has it")


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Describe the option `--dir` to argparse."""
    parser.add_argument(
        "--dir", metavar="DIR", help="where runs are (default: GRADWATCH_DIR, else ./gradwatch-runs)"
    )


def chosen_run(arguments: argparse.Namespace) -> Path:
    """The run named, else the newest of `--dir`; GradwatchError where there is none, or two are named."""
    named = [run for run in (arguments.run, getattr(arguments, "named", None)) if run]
    if len(named) > 1:
        raise GradwatchError(f"one run at a time, not {named[0]} and {named[1]}")
    return Path(named[0]) if named else newest(Path(arguments.dir or default_directory()))


def chosen_runs(arguments: argparse.Namespace) -> list[Path]:
    """The runs named, else the newest of `--dir`; GradwatchError where there is none."""
    named = [Path(run) for run in (*arguments.runs, arguments.named) if run]
    return named or [newest(Path(arguments.dir or default_directory()))]


def newest(directory: Path) -> Path:
    """The run written to last; GradwatchError where there is none."""
    try:
        runs = [path for path in directory.iterdir() if path.is_dir() and any(_files(path))]
    except OSError as error:
        raise GradwatchError(f"no runs in {directory}: {error.strerror}; {ADVICE}") from None
    if not runs:
        raise GradwatchError(f"no runs in {directory}; {ADVICE}")
    return max(runs, key=lambda run: max(path.stat().st_mtime for path in _files(run)))


def _files(run: Path) -> Iterator[Path]:
    """Files that may be journals there: no links, and no pipes, of such names."""
    return (path for path in run.glob("*.gwj") if path.is_file() and not path.is_symlink())


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add `--jobs` and `--backend`, for commands that read many runs."""
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="of joblib: loky (processes), threading, dask (default: loky where there are several jobs)",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def add_rank(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--rank`; `what` is done with the journal of that rank."""
    parser.add_argument(
        "--rank", type=int, metavar="N", help=f"{what} of this rank (default: the lowest there is)"
    )
