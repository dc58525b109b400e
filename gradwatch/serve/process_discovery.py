"""Processes found in the run folders: which processes (rank and place) there are, and whether they still run.

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
from collections.abc import Callable, Iterator
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
_ENDPOINT = re.compile(r"endpoint-rank(\d{1,9})(?:-(\d{1,9}))?\.json")
_MOST_BYTES = 1 << 16

OwnerOf = Callable[[Path], "RunInfo | None"]
"""Gives the run that wrote a journal, by the path of its head; None where that does not say."""


@dataclass(frozen=True, slots=True)
class EndpointFile:
    """Contents of `endpoint-rank{rank}.json`, of a process that serves metrics, or did when it was killed."""

    run_id: str
    rank: int
    place: int
    attempt: int
    address: Address
    node: str
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Process:
    """The latest attempt in one place of a rank (see `RunInfo.place`), as far as the folder of the run shows.

    `journal` is the head of its journal, None without one, and `owner` who wrote that; `sign_of_life` the Unix time at
    which it last wrote anything; `stamp` changes whenever its files do.
    """

    folder: Path
    rank: int
    place: int
    endpoint: EndpointFile | None
    journal: Path | None
    owner: RunInfo | None
    sign_of_life: float
    stamp: tuple[tuple[str, int, int], ...]

    def state(self, now: float) -> State:
        """State of the process; who wrote its journal is asked where there is no endpoint file."""
        endpoint, owner = self.endpoint, self.owner
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


@dataclass(slots=True)
class _Journal:
    """The files of one journal, head first, and who wrote it."""

    owner: RunInfo | None
    files: list[tuple[JournalName, Path, os.stat_result]]


def processes(folder: Path, owner_of: OwnerOf = lambda head: None) -> list[Process]:
    """The latest attempt in every place of every rank in one run folder, by rank and place.

    A journal that does not say who wrote it counts as one of place 0.
    """
    endpoints: dict[tuple[int, int], tuple[EndpointFile, float]] = {}
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
        elif found and (says := read_endpoint(path)) is not None:
            key = int(found[1]), int(found[2] or 0)
            if key == (says.rank, says.place):
                endpoints[key] = (says, status.st_mtime)
    newest: dict[tuple[int, int], _Journal] = {}
    for (rank, _), files in sorted(journals.items()):
        files.sort(key=lambda item: item[0])
        owner = owner_of(files[0][1])
        newest[rank, _place_of(owner)] = _Journal(owner, files)
    keys = sorted({*endpoints, *newest})
    return [_latest(folder, key, endpoints.get(key), newest.get(key)) for key in keys]


def _place_of(owner: RunInfo | None) -> int:
    return owner.place if owner is not None and 0 <= owner.place < 1 << 31 else 0


def _latest(
    folder: Path, key: tuple[int, int], endpoint: tuple[EndpointFile, float] | None, journal: _Journal | None
) -> Process:
    """The latest process of one place, by its endpoint file and its newest journal, which may be of different ones."""
    owner = None if journal is None else journal.owner
    if endpoint is not None and owner is not None and not _is_same(endpoint[0], owner):
        if _is_later(*endpoint, owner):
            owner = journal = None
        else:
            endpoint = None
    files = [] if journal is None else journal.files
    signs = [status.st_mtime for _, _, status in files] + ([endpoint[1]] if endpoint else [])
    stamp = tuple((path.name, status.st_size, status.st_mtime_ns) for _, path, status in files)
    head = files[0][1] if files else None
    says = endpoint[0] if endpoint else None
    return Process(folder, *key, says, head, owner, max(signs, default=0.0), stamp)


def _is_same(endpoint: EndpointFile, owner: RunInfo) -> bool:
    """True if one process wrote both."""
    return (endpoint.node, endpoint.pid) == (owner.host, owner.pid)


def _is_later(endpoint: EndpointFile, written: float, owner: RunInfo) -> bool:
    """True if the process of an endpoint file, written then, began after the one of a journal.

    A journal's number counts all attempts, that of an endpoint file only those of a launcher.
    """
    return endpoint.attempt > owner.attempt or written >= owner.start_time


def read_endpoint(path: Path) -> EndpointFile | None:
    """An endpoint file; None where it is half-written, not one, or makes no sense."""
    try:
        says = json.loads(read_regular(path, _MOST_BYTES))
        host = str(ipaddress.ip_address(says["host"]))
        numbers = {name: says[name] for name in ("port", "pid", "rank", "attempt")}
        numbers["place"] = says.get("place", 0)  # earlier versions know only one
        started = says.get("started", 0)
        if not all(type(each) is int and 0 <= each < 1 << 31 for each in numbers.values()):
            return None
        if not 0 < numbers["port"] < 65536 or type(started) is not int:
            return None
        return EndpointFile(
            run_id=_text(says["run_id"]),
            rank=numbers["rank"],
            place=numbers["place"],
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
