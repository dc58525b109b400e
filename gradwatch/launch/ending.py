"""The end of a process under `gradwatch run`: a line on stderr that says what was watched of what the process did.

Every process that trained speaks for itself, of several ranks the first; so does the process that was launched where
nothing was trained at all, neither there nor, as far as the run's folder says, in its children. Nothing is printed by
a process that is killed, or leaves by `os._exit`: its journal has no end, and `gradwatch audit` says so.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gradwatch import stderr
from gradwatch.account import Account, lines
from gradwatch.account.ending import how_it_ends, printed_at_exit
from gradwatch.account.text import nothing_seen
from gradwatch.hooks import clipping
from gradwatch.settings import DEFAULT_DIR, LAUNCHED_IN, quiet_asked
from gradwatch.taps import making
from gradwatch.taps.process_totals import TOTALS, count_backwards

LAUNCHED = "GRADWATCH_LAUNCH_PID"
"""The process that `gradwatch run` became; its children have it in their environment too."""

_reasons: list[str] = []
_armed_at: list[float] = []
_said_by: list[int] = []


def arm() -> None:
    """Count from here on, and speak when the process exits: after everything that is registered later."""
    if not _armed_at:
        _armed_at.append(time.time())
        printed_at_exit[0] = True
        count_backwards()
        making.listen(_nothing)
        clipping.listen(_nothing)
        atexit.register(say)


def not_watched(reason: str) -> None:
    """Something kept steps from being watched; told at the end, in one line, where steps are missing."""
    reason = " ".join(reason.split())
    if reason not in _reasons:
        _reasons.append(reason)


def say() -> None:
    """Print what there is to say, once a process and at once, so that other processes do not write in between."""
    if os.getpid() in _said_by:
        return
    _said_by.append(os.getpid())
    told = list(_told())
    if told and not quiet_asked():
        stderr.say("\n".join(told))


def _told() -> Iterator[str]:
    if os.environ.get("RANK", "0") not in ("", "0"):
        return
    account = account_of_process()
    if account.rank:
        return
    if account.told:
        yield from lines(account, shown(account.directory))
    elif os.environ.get(LAUNCHED) == str(os.getpid()) and not _recorded_elsewhere():
        yield nothing_seen(account)


def account_of_process() -> Account:
    """The account of everything that this process did; its watches, if there were any, have been closed."""
    watching = sys.modules.get("gradwatch.watching")
    account: Account = Account(taken=TOTALS.taken()) if watching is None else watching.account_of_process()
    reasons = tuple(dict.fromkeys((*_reasons, *account.reasons)))
    return replace(account, reasons=reasons, ended=account.ended or how_it_ends())


def _recorded_elsewhere() -> bool:
    """Whether another process of this launch has written to the run's folder: a rank of torchrun, a spawned worker."""
    root = os.environ.get("GRADWATCH_DIR") or DEFAULT_DIR
    folder = Path(os.environ.get(LAUNCHED_IN, ""), root, os.environ.get("GRADWATCH_RUN_ID", ""))
    try:
        return any(path.stat().st_mtime >= _armed_at[0] for path in folder.glob("*.gwj"))
    except OSError:
        return False


def shown(directory: str) -> str:
    """A folder as it can be typed where `gradwatch run` was."""
    try:
        near = os.path.relpath(directory, os.environ.get(LAUNCHED_IN)) if directory else ""
    except (OSError, ValueError):  # the working folder is gone
        return directory
    return directory if near.startswith("..") else near


def _nothing(*_: object) -> None:
    """A listener for the sake of what the tap itself counts."""
