"""The place of a watch among those of the same run and rank that are at work at the same time: 0, 1, 2, …

Outputs name a process by its run and rank. Two watches in one process, forked children that train and the trials of a
sweep have both in common: what one writes would take the place of what another has written, and be taken for it. So
each holds the first place that is free, by a lock (flock) on a file in the folder of the run. The kernel frees it
however its process ends: one that is started again has its place again, and its series go on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gradwatch.endpoint.own_socket import file_of, is_file
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.atomic_files import make_directory
from gradwatch.sinks import Sink

MOST_PLACES = 1 << 12
REFUSED = (
    "{} allows no lock ({}): outputs name this process by run and rank alone, so another watch of rank {} that is at "
    "work at the same time would take its place in /metrics and alerts"
)
_TRIES = 16


class ProcessPlace:
    """One place, held from `claim` to `release`, or to the end of the process.

    Nothing is held where no sink names the process, or where the folder of the run cannot be written or allows no
    locks: then the place is 0, and `refusal` says why.
    """

    __slots__ = ("_descriptor", "_file", "_path", "number", "refusal")

    def __init__(self) -> None:
        self.number = 0
        self.refusal = ""
        self._path, self._file = "", (0, 0)
        self._descriptor: int | None = None

    def claim(self, run: RunInfo, sinks: Iterable[Sink]) -> RunInfo:
        """The run with its place, which is held from here on if one of these sinks needs it; raises nothing."""
        if self._descriptor is None and any(getattr(sink, "needs_place", False) for sink in sinks):
            try:
                make_directory(Path(run.directory))
                self._take_first_free(run)
            except OSError as error:
                self.refusal = REFUSED.format(run.directory, error.strerror or error, run.rank)
        return replace(run, place=self.number)

    def release(self) -> None:
        """Free the place for others. Idempotent; no-op in a forked child, whose parent has it."""
        descriptor, self._descriptor = self._descriptor, None
        _HELD.pop(self._path, None)
        if descriptor is None or not is_file(descriptor, self._file):
            return  # closed behind our back: the file may be another's by now
        try:
            if _is_at(self._path, self._file):
                # Before it is closed: who has opened it meanwhile sees that it is gone once it has the lock.
                with suppress(OSError):
                    os.unlink(self._path)
        finally:
            os.close(descriptor)

    def forked(self) -> None:
        """Close the parent's lock in a forked child: it would outlive a parent that is killed."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and is_file(descriptor, self._file):
            os.close(descriptor)

    def _take_first_free(self, run: RunInfo) -> None:
        for number in range(MOST_PLACES):
            path = os.path.join(run.directory, f"place-rank{run.rank}-{number}.lock")
            # Held here by a lock that the script has closed behind our back, or by one that holds.
            if path not in _HELD and self._take(path):
                self.number = number
                return

    def _take(self, path: str) -> bool:
        """True if the lock was free. Raises OSError where none can be made."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for _ in range(_TRIES):
            descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file = file_of(descriptor)
                if _is_at(path, file):  # else whoever had it has taken the file away meanwhile
                    self._path, self._file, self._descriptor = path, file, descriptor
                    _HELD[path] = self
                    return True
            except BlockingIOError:
                return False
            finally:
                if self._descriptor != descriptor:
                    os.close(descriptor)
        return False


def _is_at(path: str, file: tuple[int, int]) -> bool:
    """True if `path` is this file itself."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == file


_HELD: dict[str, ProcessPlace] = {}  # by the path of the lock


def _forked() -> None:
    for place in list(_HELD.values()):
        place.forked()
    _HELD.clear()


os.register_at_fork(after_in_child=_forked)
