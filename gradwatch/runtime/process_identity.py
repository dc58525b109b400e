"""Identity of this process, its rank among others, and checks whether another one is running."""

from __future__ import annotations

import os
import sys

_TICKS = 2.0  # seconds; when a process started is known in ticks since a boot that is known in seconds

here = [os.getpid()]
"""In one place: the id of this process, also in a forked child. Not of one that C code forks behind Python's back.

Known without a call: what a step asks twice finds cold caches after a backward.
"""


PROGRAM = os.urandom(8).hex()
"""A name of what runs in this process, which its forked children share, and no other process has.

Not even one with the same id: another program that `os.exec…` puts in its place, or one in another container.
"""


def _forked() -> None:
    here[0] = os.getpid()


os.register_at_fork(after_in_child=_forked)


_group_rank: list[int | None] = [None]


def group_rank() -> int | None:
    """Rank in torch's process group, or in the one there was when this was asked before; None where there was none."""
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        _group_rank[0] = group.get_rank()
    return _group_rank[0]


def prints() -> bool:
    """True for rank 0 of a process group, which prints for it, and for a process that is in none.

    A launcher gives numbers (RANK) also to processes that train apart, a sweep or a job of one pod: no other one prints
    for them.
    """
    return not group_rank()


def start_ticks(pid: int) -> int:
    """Start time of a process, in clock ticks since boot; 0 where that cannot be known.

    An id alone is not enough: it is given to another process sooner or later. Field 22 of proc(5)'s stat.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name may hold blanks and brackets; it ends at the last bracket.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def started_at(pid: int) -> float:
    """Start time of a process, in Unix seconds; 0 where that cannot be known."""
    ticks = start_ticks(pid)
    try:
        with open("/proc/stat", "rb") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith(b"btime"))
    except (OSError, ValueError, StopIteration):
        return 0.0
    return boot + ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def is_running(pid: int, started: int = 0) -> bool:
    """True if process `pid` of this machine exists and, where `started` is known, is the one that was meant."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True  # another user's process
    ticks = start_ticks(pid)
    return not (started and ticks and ticks != started) and not _is_zombie(pid)


def alive(pid: int, known_at: float) -> bool:
    """True if the process that had this id at that time (Unix seconds) still runs; 0 is no process."""
    return is_running(pid) and started_at(pid) <= known_at + _TICKS


def _is_zombie(pid: int) -> bool:
    """True if it has ended and its parent has not asked for its exit status yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return False
