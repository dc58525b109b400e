"""Scripts run bare and under `gradwatch run`, each in an empty folder, and what the journal says of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwatch.journal import read_journal
from gradwatch.journal.reader import JournalReader
from gradwatch.records.event import Event
from gradwatch.records.record import Record
from tests.support import warm
from tests.support.launch_cases import GRADWATCH, ROOT

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 240


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and the folder it ran in."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    def journals(self) -> tuple[JournalReader, ...]:
        """Every journal below the folder: one a rank and attempt; none where nothing was watched."""
        runs = sorted({path.parent for path in self.folder.glob("gradwatch-runs/*/*.gwj")})
        return tuple(journal for run in runs for journal in read_journal(run))

    def records(self) -> list[Record]:
        """The Records of every journal."""
        return [step.record for journal in self.journals() for step in journal.records()]

    def fired(self) -> Iterator[Event]:
        """The events that began an incident."""
        return (each for journal in self.journals() for each in journal.events() if each.kind == "firing")


def environment(**extra: str) -> dict[str, str]:
    """The environment of every run, without what the test run itself was started with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWATCH", "PYTHON"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **extra}


def execute(command: Sequence[str], folder: Path, **env: str) -> Outcome:
    """Run one command in a folder, to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    done = warm.run(command, folder, environment(**env), timeout=SECONDS)
    return Outcome(done.returncode, done.stdout, done.stderr, folder)


def bare(name: str, folder: Path, *argv: str) -> Outcome:
    """Run `python scripts/NAME.py ARGV` in `folder`/bare."""
    return execute([sys.executable, str(SCRIPTS / f"{name}.py"), *argv], folder / "bare")


def watched(name: str, folder: Path, *argv: str, options: Sequence[str] = ()) -> Outcome:
    """Run `gradwatch run OPTIONS -- python scripts/NAME.py ARGV` in `folder`/watched."""
    launcher = [*GRADWATCH, "run", "--listen", "127.0.0.1:0", *options, "--"]
    return execute([*launcher, sys.executable, str(SCRIPTS / f"{name}.py"), *argv], folder / "watched")


def watching_itself(name: str, folder: Path, *argv: str) -> Outcome:
    """Run `python scripts/NAME.py ARGV`, a script that calls `gradwatch.watch`, in `folder`/itself."""
    return execute([sys.executable, str(SCRIPTS / f"{name}.py"), *argv], folder / "itself", PYTHONPATH=ROOT)
