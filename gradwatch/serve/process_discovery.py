"""Processes found in the run folders: which processes (rank and attempt) there are, and whether they still run.

Files of any user may lie there, half-written or hostile: what cannot be read is passed over, nothing is followed,
nothing is written.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradwatch.endpoint.address import Address
from gradwatch.journal.reader import JournalName
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.atomic_files import read_regular
from gradwatch.runtime.process_identity import is_running, started_at

State = Literal["running", "ended", "silent"]
SILENT_SECONDS = 86_400.0
"""A process of another machine that has written nothing for so long is taken for gone; its number says nothing here."""
_ENDPOINT = re.compile(r"endpoint-rank(\d{1,9})\.json")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EndpointFile:
    """Contents of `endpoint-rank{rank}.json`, of a process that serves metrics, or did when it was killed."""

    run_id: str
    rank: int
    attempt: int
    address: Address
    node: str
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Process:
    """The latest attempt of one rank of a run, as far as its folder shows.

    `journal` is the head of its journal, None without one; `sign_of_life` the Unix time at which it last wrote
    anything; `stamp` changes whenever its files do.
    """

    folder: Path
    rank: int
    attempt: int
    endpoint: EndpointFile | None
    journal: Path | None
    sign_of_life: float
    stamp: tuple[tuple[str, int, int], ...]

    def state(self, now: float, owner: RunInfo | None) -> State:
        """State of the process; `owner` is who wrote its journal, asked where there is no endpoint file."""
        endpoint = self.endpoint
        if endpoint is not None and endpoint.node == platform.node():
            return "running" if is_running(endpoint.pid, endpoint.started) else "ended"
        if endpoint is None and owner is not None and owner.host == platform.node():
            # It attached after it started: a process that is younger has only been given the same number.
            mine = is_running(owner.pid) and started_at(owner.pid) <= owner.start_time + 2
            return "running" if mine else "ended"
        return "silent" if now - self.sign_of_life > SILENT_SECONDS else "running"


def run_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders directly in `root` and the time of their last change; none where it cannot be read."""
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        yield Path(entry.path), entry.stat(follow_symlinks=False).st_mtime_ns
                except OSError:
                    continue  # removed meanwhile
    except OSError:
        return


def processes(folder: Path) -> list[Process]:
    """The latest attempt of every rank in one run folder, by rank."""
    endpoints: dict[int, tuple[EndpointFile, float]] = {}
    journals: dict[tuple[int, int], list[tuple[JournalName, Path, os.stat_result]]] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        path = folder / name
        found = _ENDPOINT.fullmatch(name)
        journal = None if found else JournalName.parse(name)
        status = _regular(path) if found or journal else None
        if status is None:
            continue
        if journal:
            journals.setdefault((journal.rank, journal.attempt), []).append((journal, path, status))
        elif (says := read_endpoint(path)) is not None and found and says.rank == int(found[1]):
            endpoints[says.rank] = (says, status.st_mtime)
    ranks = sorted({*endpoints, *(rank for rank, _ in journals)})
    return [_latest(folder, rank, endpoints.get(rank), journals) for rank in ranks]


def _latest(
    folder: Path,
    rank: int,
    endpoint: tuple[EndpointFile, float] | None,
    journals: dict[tuple[int, int], list[tuple[JournalName, Path, os.stat_result]]],
) -> Process:
    attempts = [attempt for known, attempt in journals if known == rank]
    newest = max([*attempts, endpoint[0].attempt if endpoint else 0])
    says = endpoint if endpoint and endpoint[0].attempt == newest else None
    files = sorted(journals.get((rank, newest), ()), key=lambda item: item[0])
    signs = [status.st_mtime for _, _, status in files] + ([says[1]] if says else [])
    stamp = tuple((path.name, status.st_size, status.st_mtime_ns) for _, path, status in files)
    head = files[0][1] if files else None
    return Process(folder, rank, newest, says[0] if says else None, head, max(signs, default=0.0), stamp)


def read_endpoint(path: Path) -> EndpointFile | None:
    """An endpoint file; None where it is half-written, not one, or makes no sense."""
    try:
        says = json.loads(read_regular(path, _MOST_BYTES))
        host = str(ipaddress.ip_address(says["host"]))
        numbers = {name: says[name] for name in ("port", "pid", "rank", "attempt")}
        started = says.get("started", 0)
        if not all(type(each) is int and 0 <= each < 1 << 31 for each in numbers.values()):
            return None
        if not 0 < numbers["port"] < 65536 or type(started) is not int:
            return None
        return EndpointFile(
            run_id=_text(says["run_id"]),
            rank=numbers["rank"],
            attempt=numbers["attempt"],
            address=Address(host, numbers["port"]),
            node=_text(says.get("node", "")),
            pid=numbers["pid"],
            started=started,
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError("not a short text")
    return value


def _regular(path: Path) -> os.stat_result | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None
