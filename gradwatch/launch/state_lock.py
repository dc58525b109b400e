"""Lock on the saved state of a rank: one process of a launch loads and saves it, however many have that rank.

What a script forks, spawns or starts as a command inherits its RANK, or has none, and so counts as the same rank.
Forked processes and those of multiprocessing (joblib's too) are workers of the script and save nothing, unless
torch.distributed has made them one of several ranks. Of all other processes the first that trains holds a lock on
`state-rankN.lock` until it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys

from gradwatch.endpoint.own_socket import file_of, is_file
from gradwatch.records.run_info import RunInfo
from gradwatch.session.settings import told_by

WORKER = "a process started by multiprocessing saves none, unless it is one of several ranks"
FORKED = "a forked process saves none, unless it is one of several ranks"
TAKEN = "another process of this run with the same rank saves them"


class StateLock:
    """The claim of this process to the state of its rank; `refusal` says why it has none ("" = none is known)."""

    def __init__(self, run: RunInfo) -> None:
        self.refusal = "" if run.world_size > 1 else _worker()
        self._path = os.path.join(run.directory, f"state-rank{run.rank}.lock")
        self._descriptor: int | None = None
        self._file = 0, 0  # that it stands for, while the script has not closed it

    def keeps(self) -> bool:
        """True if this process owns the state; takes the lock if it is free.

        False without a `refusal`: the folder of the run does not exist (yet). Raises OSError if no lock can be made.
        """
        if self.refusal:
            return False
        if self._descriptor is None:
            self._lock()
        return self._descriptor is not None

    def release(self) -> None:
        """Close the lock; in a forked child that leaves the parent's lock as it is."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and is_file(descriptor, self._file):
            os.close(descriptor)

    def _lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._path, flags, 0o600)
        except FileNotFoundError:
            return
        self._file = file_of(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            taken = isinstance(error, BlockingIOError)
            self.refusal = TAKEN if taken else f"the run's folder allows no locks ({error.strerror})"
            self.release()


def command() -> str:
    """The command line of this process as a digest: in clear it may hold secrets."""
    return hashlib.sha256("\0".join(sys.orig_argv).encode(errors="surrogateescape")).hexdigest()[:16]


def of_another_command(saved: object) -> bool:
    """True if another command than this one's saved a state, where commands distinguish two processes.

    They do among the processes that one Python process starts as commands: a launcher's training, or one of several
    trials.
    """
    return bool(told_by()) and isinstance(saved, str) and saved != command()


def _worker() -> str:
    """The reason why this process is one of the script's own workers; "" where it is none."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        return WORKER
    started = getattr(sys.modules.get("gradwatch_import_hook"), "STARTED", os.getpid())
    return "" if started == os.getpid() else FORKED
