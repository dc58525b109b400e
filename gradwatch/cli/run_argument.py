"""Runs on disk, as commands name them: a folder, a journal file, or the newest there is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from gradwatch.journal import JournalReader


ADVICE = "name the folder of a run, give --dir, or make a run: gradwatch run -- python train.py"


def default_directory() -> str:
    """The folder of all runs: GRADWATCH_DIR, else ./gradwatch-runs."""
    from gradwatch.session.settings import DEFAULT_DIR

    return os.environ.get("GRADWATCH_DIR") or DEFAULT_DIR


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Describe the option `--dir` to argparse."""
    parser.add_argument(
        "--dir", metavar="DIR", help="where runs are (default: GRADWATCH_DIR, else ./gradwatch-runs)"
    )


def chosen_run(arguments: argparse.Namespace) -> Path:
    """The run named, else the newest of `--dir`; GradwatchError where there is none."""
    return Path(arguments.run) if arguments.run else newest(Path(arguments.dir or default_directory()))


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


def journals(where: Path, rank: int | None = None) -> list[JournalReader]:
    """The journals of one rank (None = all), one per attempt; of a file that is named itself, of any rank.

    Raises GradwatchError if there are none, or they cannot be read.
    """
    from gradwatch.journal import read_journal

    try:
        found = read_journal(where)
    except OSError as error:
        raise GradwatchError(str(error)) from None
    chosen = [one for one in found if rank is None or one.rank == rank or not where.is_dir()]
    if not chosen:
        ranks = ", ".join(str(one) for one in sorted({one.rank for one in found}))
        raise GradwatchError(f"no journal of rank {rank} in {where}; there are: {ranks}")
    return chosen
