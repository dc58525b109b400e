"""All processes of a script that a command has started, whatever sessions they are in, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PATIENCE = 5.0
"""Seconds that processes have to end on SIGTERM: launchers end their workers on it, which lead their own sessions."""
_LEFT_BEHIND = 0.5  # seconds for those that outlive the script
_MOST_SECONDS = 10.0


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the process, which leads a session, and all others with `mark` in their environment; returns once they are.

    Children inherit the environment, so the mark finds them in other sessions, too, where there is a /proc; elsewhere
    those are found that are in the session's process group.
    """
    patience = PATIENCE if process.poll() is None else _LEFT_BEHIND
    _signal_group(process, signal.SIGTERM)
    _wait(process, mark, patience)
    deadline = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < deadline:  # one that was forked meanwhile is found by the next look
        _signal_group(process, signal.SIGKILL)
        for pid in _marked(mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if _wait(process, mark, _LEFT_BEHIND):
            return


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _wait(process: subprocess.Popen[bytes], mark: str, seconds: float) -> bool:
    """True as soon as none of them runs; False after so many seconds."""
    deadline = time.monotonic() + seconds
    while process.poll() is None or any(_marked(mark)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _marked(mark: str) -> Iterator[int]:
    """Processes that run, not this one, in whose environment the mark stands; those that ended have none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if int(folder.name) != os.getpid() and os.fsencode(mark) in (folder / "environ").read_bytes():
                yield int(folder.name)
