"""All runs at one moment: scanned from the folders again and again, never changed once made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gradwatch.endpoint.address import Address
from gradwatch.journal.entries import RunEntry
from gradwatch.journal.reader import JournalReader
from gradwatch.records.run_info import RunInfo
from gradwatch.serve.allowed_targets import AllowedTargets
from gradwatch.serve.ended_run_counters import Summaries, Summary
from gradwatch.serve.process_discovery import Process, processes, run_folders
from gradwatch.sinks.prometheus.file_sd import MOURNING_SECONDS

_QUIET_SECONDS = 60.0

RunState = Literal["running", "finished", "stopped", "failed", "died", "silent", "unreadable"]
STATES: tuple[RunState, ...] = get_args(RunState)


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the fleet. `address` is where it serves metrics, None where it does not (any more) or where
    Prometheus may not be sent (see `AllowedTargets`): then `refused` says where.

    `mourned`: it was killed less than 15 minutes ago, so that Prometheus is to find it down.
    """

    run_id: str
    rank: int
    place: int
    state: RunState
    folder: Path
    sign_of_life: float
    node: str = ""
    script: str = ""
    address: Address | None = None
    refused: Address | None = None
    mourned: bool = False
    summary: Summary | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        """Identity of the process in Prometheus: run, rank and place."""
        return self.run_id, self.rank, self.place


@dataclass(frozen=True, slots=True)
class Fleet:
    """Every process found, the one that last gave a sign of life first; one per run, rank and place."""

    members: tuple[Member, ...]
    scanned_at: float
    scan_seconds: float
    errors: int = 0
    refused: tuple[Member, ...] = ()
    """Those running whose address is not among the targets: not of this machine, and not allowed."""

    def ended_since(self, moment: float, most: int) -> list[Member]:
        """Runs with a summary that ended after `moment` (Unix time), the latest first."""
        ended = [member for member in self.members if member.summary and member.summary.end.time >= moment]
        return ended[:most]

    def targets(self) -> list[Member]:
        """Processes for Prometheus to scrape, by run, rank and place.

        One at each address, the last to give a sign of life: who has a dead process's port would be scraped as that
        process, and its numbers stand under the name of another run.
        """
        live: dict[tuple[str, Address], Member] = {}
        for member in self.members:
            if member.address and member.state == "running":
                live.setdefault((member.node, member.address), member)
        taken = {(node, address.port) for node, address in live}
        dead = [
            each
            for each in self.members
            if each.mourned and each.address and (each.node, each.address.port) not in taken
        ]
        return sorted([*live.values(), *dead], key=lambda member: member.key)

    def count(self, state: RunState) -> int:
        """Number of processes in a state."""
        return sum(member.state == state for member in self.members)


@dataclass(slots=True)
class Scanner:
    """Looks at run folders; a folder in which everything has ended is not read again until it changes."""

    roots: Sequence[Path]
    summaries: Summaries
    progress: Callable[[int, int], None] = lambda done, all: None
    reach: AllowedTargets = field(default_factory=AllowedTargets)
    errors: int = 0
    _unchanged: dict[Path, tuple[int, tuple[Member, ...]]] = field(default_factory=dict)
    _owners: dict[Path, RunInfo] = field(default_factory=dict)

    def report_to(self, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Call this after each folder, with the number of folders read and of all; gives what was called so far."""
        before, self.progress = self.progress, progress
        return before

    def count_error(self) -> None:
        """Count an error that cost the view of a run, and no more."""
        self.errors += 1

    def scan(self) -> Fleet:
        """Everything there is at this moment; what cannot be read is counted and passed over."""
        began = time.perf_counter()
        now = time.time()
        folders = [found for root in self.roots for found in run_folders(root)]
        members: list[Member] = []
        for number, (folder, changed) in enumerate(folders, 1):
            unchanged = self._unchanged.get(folder)
            if unchanged is not None and unchanged[0] == changed:
                members.extend(unchanged[1])
                continue
            try:
                found = [self._member(process, now) for process in processes(folder, self._owner)]
            except (OSError, ValueError, LookupError):
                self.count_error()
                continue
            members.extend(found)
            if all(member.summary and not member.mourned for member in found):
                self._unchanged[folder] = (changed, tuple(found))
            self.progress(number, len(folders))
        self._discard({folder for folder, _ in folders})
        newest = _newest_of_each(members)
        refused = tuple(member for member in newest if member.refused and member.state == "running")
        return Fleet(newest, now, time.perf_counter() - began, self.errors, refused)

    def _member(self, process: Process, now: float) -> Member:
        owner, endpoint = process.owner, process.endpoint
        run_id = endpoint.run_id if endpoint else owner.run_id if owner else process.folder.name
        alive = process.state(now)
        over = alive == "ended" or (alive == "running" and self._is_closed(process, now))
        summary = self.summaries.get(process) if over else None
        state: RunState = "running" if alive == "running" and summary is None else "silent"
        if summary is not None:
            state = summary.end.outcome
        elif alive == "ended":
            state = "died" if endpoint else "unreadable"
        elif state == "running" and endpoint is None and owner is None and _is_quiet(process, now):
            state = "unreadable"  # nothing says whose it is, nor that anything still writes it
        allowed = endpoint is not None and self.reach.allows(endpoint)
        return Member(
            run_id=run_id,
            rank=process.rank,
            place=process.place,
            state=state,
            folder=process.folder,
            sign_of_life=process.sign_of_life,
            node=endpoint.node if endpoint else owner.host if owner else "",
            script=owner.script if owner else "",
            address=endpoint.address if endpoint and allowed else None,
            refused=endpoint.address if endpoint and not allowed else None,
            mourned=state == "died" and now - process.sign_of_life < MOURNING_SECONDS,
            summary=summary,
        )

    def _is_closed(self, process: Process, now: float) -> bool:
        """True if a process that cannot be seen has closed its journal: of another machine, its endpoint file gone.

        Asked only after a minute without a write: to read a journal whenever it grows would be dear.
        """
        if process.endpoint is not None or not _is_quiet(process, now):
            return False
        summary = self.summaries.get(process)
        return summary is not None and summary.complete

    def _owner(self, journal: Path) -> RunInfo | None:
        """The run that wrote a journal, from the first entry of its head."""
        if journal not in self._owners:
            try:
                with closing(JournalReader(journal).entries()) as entries:
                    entry = next(entries, None)
            except OSError:
                return None
            if not isinstance(entry, RunEntry):
                return None  # not written yet, or damaged
            self._owners[journal] = entry.run
        return self._owners[journal]

    def _discard(self, folders: set[Path]) -> None:
        for folder in self._unchanged.keys() - folders:
            del self._unchanged[folder]
        for journal in [each for each in self._owners if each.parent not in folders]:
            del self._owners[journal]
        self.summaries.discard(set(self._owners))


def _is_quiet(process: Process, now: float) -> bool:
    return now - process.sign_of_life >= _QUIET_SECONDS


def _newest_of_each(members: Iterable[Member]) -> tuple[Member, ...]:
    """One per run, rank and place (a copied folder must not void a scrape), the latest sign of life first."""
    found: dict[tuple[str, int, int], Member] = {}
    for member in sorted(members, key=lambda each: each.sign_of_life, reverse=True):
        found.setdefault(member.key, member)
    return tuple(found.values())
