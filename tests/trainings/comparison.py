"""One training, bare and watched, each in an empty folder: what differs, and what was counted."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gradwatch.journal import read_journal
from tests.support import warm
from tests.support.launch_cases import GRADWATCH
from tests.trainings.situations import Training

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 250
# What the account at the end calls them: taken and watched, rejected by a scaler, without an optimizer.
COUNTED = re.compile(
    r"gradwatch: (\d+) of (\d+) steps watched(?: and (\d+) of (\d+) rejected)?(?:.*?, (\d+) windows without)?"
)
UNFIT = re.compile(r"not healthy at the end: [^·]*")
MADE_UP = re.compile(r"opt\d+\.group\S*")
OPTIONS = (
    "run",
    "--rules",
    "observe-only",
    "--dir",
    "runs",
    "--run-id",
    "r",
    "--listen",
    "127.0.0.1:0",
    "--",
)


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Compared:
    """Both runs of a training; `recorded` = the records in each journal, by (rank, attempt)."""

    training: Training
    bare: Ended
    watched: Ended
    recorded: dict[tuple[int, int], int]

    @property
    def taken(self) -> int:
        """The steps that the script says it took, over all its processes."""
        line = next(each for each in self.bare.stdout.splitlines() if each.startswith("weights "))
        return int(line.split()[-1]) * self.training.ranks

    @property
    def counted(self) -> tuple[int, int]:
        """(watched, seen) by the accounts on stderr: one a process that trained, of several ranks the first's."""
        told = [[int(n or 0) for n in found] for found in COUNTED.findall(self.watched.stderr)]
        return sum(w + r + h for w, _, r, _, h in told), sum(s + q + h for _, s, _, q, h in told)

    def differences(self) -> list[str]:
        """Sentences, one a difference; none where the promise is kept."""
        found = []
        if self.bare.status != self.training.status:
            found.append(f"bare exit status {self.bare.status}, expected {self.training.status}")
        if self.watched.status != self.bare.status:
            found.append(f"exit status {self.watched.status}, bare {self.bare.status}")
        if self.watched.stdout != self.bare.stdout:
            found.append("stdout differs")
        if sum(self.recorded.values()) * self.training.steps_a_record != self.taken:
            found.append(f"{self.recorded} steps recorded of {self.taken} taken")
        if self.counted != (self.taken // self.training.ranks,) * 2:
            found.append(f"the account says {self.counted[0]} of {self.counted[1]} of {self.taken} taken")
        if unfit := UNFIT.findall(self.watched.stderr):
            found.append(f"a training that nothing ruins is called {unfit[0]}")
        if loose := MADE_UP.search(self.watched.stderr):
            found.append(f"a parameter that a module has is called {loose[0]}")
        return found


def compare(training: Training, folder: Path) -> Compared:
    """Run a training bare and watched, side by side, below `folder`, and read its journals."""
    command = training.command(sys.executable, str(SCRIPTS))
    both = ((command, folder / "bare"), ([*GRADWATCH, *OPTIONS, *command], folder / "watched"))
    with ThreadPoolExecutor(2) as pool:
        bare, watched = pool.map(lambda one: execute(*one), both)
    run = folder / "watched" / "runs" / "r"
    journals = read_journal(run) if list(run.glob("*.gwj")) else ()
    recorded = {(each.rank, each.attempt): sum(1 for _ in each.records()) for each in journals}
    return Compared(training, bare, watched, recorded)


def execute(command: list[str], folder: Path) -> Ended:
    """One process in an empty folder, without what this process was started with."""
    folder.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWATCH", "PYTHON"))}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(SCRIPTS)}
    done = warm.run(command, folder, {**kept, **own}, timeout=SECONDS)
    return Ended(done.returncode, done.stdout, done.stderr)
