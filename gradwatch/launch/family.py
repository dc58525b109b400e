"""The processes of one launch: which of them prints the account, and what the others left in their journals.

One line comes from one launch. The process that was launched, or the first Python below it that imports torch, prints
it (`claim`), and its children, however they were started, know from their environment that it does. They leave their
account in the journal that they write into the run's folder anyway. Needs no torch: the process that was launched may
start trainings without importing it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.account import Account, merged, total
from gradwatch.process import is_running, started_at
from gradwatch.settings import DEFAULT_DIR, ROOT, TELLER, told_by

if TYPE_CHECKING:
    from gradwatch.journal import EndEntry
    from gradwatch.snapshot import RunInfo

_CLOCKS = 60.0  # seconds that the clock of a file server may be behind
_TICKS = 2.0  # seconds; when a process started is known in ticks since a boot that is known in seconds
LAUNCHED = "GRADWATCH_LAUNCH_PID"
"""The process that `gradwatch run` became; its children have it in their environment too."""


def claim() -> None:
    """Print the account of this process and all that it starts, unless a process above, still alive, does that."""
    if not alive(told_by(), began()):
        rank = os.environ.get("RANK", "")
        os.environ[TELLER] = f"{os.getpid()}:{rank}:{os.uname().nodename}:{time.time()}"


def launched() -> bool:
    """Whether this is the process that `gradwatch run` became."""
    return os.environ.get(LAUNCHED) == str(os.getpid())


def alive(pid: int, known_at: float) -> bool:
    """Whether the process that had this id at that time (Unix seconds) still runs; 0 is no process."""
    return is_running(pid) and started_at(pid) <= known_at + _TICKS


def folder() -> Path:
    """Where the processes of this launch write their journals."""
    return Path(os.environ.get(ROOT, DEFAULT_DIR), os.environ.get("GRADWATCH_RUN_ID", ""))


def recorded() -> bool:
    """Whether some process has written to the folder of this launch since it began."""
    return any(_written(began()))


def handed_over() -> bool:
    """Whether all journals of this process end with an account, where the process that prints it looks for them."""
    own = [end for run, end in _journals() if run.pid == os.getpid()]
    return bool(own) and all(end is not None and end.account for end in own)


def with_children(own: Account) -> Account:
    """The account of this process and of those that it has started, or these, and that leave the telling to it.

    A process without an end in its journal was killed, or left by `os._exit`, or runs on.
    """
    ended: dict[int, list[Account]] = {}
    open_ended: dict[int, float] = {}  # when it began to record
    for run, end in _journals():
        if run.told_by == os.getpid():
            if end is None or not end.account:
                open_ended[run.pid] = run.start_time
            else:
                ended.setdefault(run.pid, []).append(Account.from_dict(end.account))
    if not (ended or open_ended):
        return own
    children = [merged(each, total(one.taken for one in each)) for each in ended.values()]
    parts = [one for one in (own, *children) if one.told]
    running = sum(alive(pid, at) for pid, at in open_ended.items())
    return replace(
        merged(parts or [own], total(one.taken for one in (own, *children))),
        reasons=tuple(dict.fromkeys(reason for one in (own, *children) for reason in one.reasons)),
        directory=own.directory or str(folder()),
        ended=own.ended,
        processes=len(parts),
        running=running,
        lost=len(open_ended) - running,
    )


def _journals() -> Iterator[tuple[RunInfo, EndEntry | None]]:
    """Who wrote each journal of this launch, and how it ends."""
    since = began()
    found = list(_written(since - _CLOCKS))
    if not found:
        return
    # Here, not at the top: this is for processes that train, or whose children do.
    from gradwatch.journal import JournalReader

    for path in found:
        try:
            journal = JournalReader(path)
            entry, end = journal.run(), journal.end()
        except OSError:  # deleted meanwhile
            continue
        if entry is not None and entry.run.host == os.uname().nodename and entry.run.start_time >= since:
            yield entry.run, end


def began() -> float:
    """When the launch, or the part of it whose account is printed by one process, began (Unix seconds)."""
    with suppress(ValueError, IndexError):
        return float(os.environ.get(TELLER, "").split(":")[3])
    return 0.0


def _written(since: float) -> Iterator[Path]:
    """The first files of journals that were written to since then, by the clock of the file system."""
    try:
        for path in sorted(folder().glob("rank*-attempt*.gwj")):
            if path.stat().st_mtime >= since and path.name.count(".") == 1:
                yield path
    except OSError:
        return
