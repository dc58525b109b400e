"""The processes of one launch: which of them prints the account, and what the others left in their journals.

Each launch prints one line. The process that was launched, or the first Python process below it that imports torch,
prints it (`claim`). Its children, however they were started, learn from their environment that it does; they write
their account to the journal in the run's folder. Needs no torch: the process that was launched may start trainings
without importing it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gradwatch.account import Account
from gradwatch.account.launch_total import Part, launch_total
from gradwatch.runtime.process_identity import alive, started_at
from gradwatch.session.settings import DEFAULT_DIR, ROOT, TELLER, told_by

_CLOCKS = 60.0  # seconds that the clock of a file server may be behind
_SECONDS = 2.0  # for reading what processes without an end have recorded; of less, fewer steps are known
_is_one_of_several = [False]  # ranks, below a process that prints the account of all that print none
LAUNCHED = "GRADWATCH_LAUNCH_PID"
"""The process that `gradwatch run` became; its children have it in their environment too."""


def claim() -> None:
    """Print the account of this process and of all that it starts, unless a living process above it does that."""
    if not alive(told_by(), began()):
        above = os.environ.get(TELLER, "").partition(":")[0]
        _is_one_of_several[0] = above.isdigit() and alive(int(above), began())
        rank = os.environ.get("RANK", "")
        os.environ[TELLER] = f"{os.getpid()}:{rank}:{os.uname().nodename}:{time.time()}"


def launched() -> bool:
    """True if this process is the one that `gradwatch run` replaced itself with."""
    return os.environ.get(LAUNCHED) == str(os.getpid())


def folder() -> Path:
    """Folder in which the processes of this launch write their journals."""
    return Path(os.environ.get(ROOT, DEFAULT_DIR), os.environ.get("GRADWATCH_RUN_ID", ""))


def recorded() -> bool:
    """True if any process has written to the folder of this launch since this process started.

    Not since `began()`: a program that `os.exec…` has put in the place of one that trained begins anew, as the same
    process.
    """
    return any(_written(started_at(os.getpid())))


def handed_over() -> bool:
    """True if every journal of this process ends with an account, in the folder where the printing process looks."""
    own = [part.ended for part in _parts(own=True) if part.pid == os.getpid()]
    return bool(own) and all(own)


def with_children(own: Account) -> Account:
    """The account of this process and of all processes below it that print none of their own.

    A process without an end in its journal was killed, or left by `os._exit`, or is still running: what it has recorded
    counts. The same holds for a first rank that ended without printing (it would have printed its own account), and for
    one that was ended between its journal and its line (torchrun ends the ranks beside one that failed).
    """
    children = [part for part in _parts(own=False) if _spoken_for(part)]
    if not children:
        return own
    return replace(launch_total(children, _runs, own), directory=own.directory or str(folder()))


def note_printed() -> None:
    """Mark that this process has printed its account, so that a process above it does not print it again."""
    # Whether or not it is told by that one: a script may set the rank of its process after the start of it.
    above = os.environ.get(TELLER, "").partition(":")[0]
    below_another = above.isdigit() and int(above) != os.getpid() and alive(int(above), began())
    if _is_one_of_several[0] or below_another:
        with suppress(OSError):
            _printed_note(os.getpid()).touch()


def unnote_printed() -> None:
    """Take back `note_printed`: the process goes on, so that what it has printed is not its whole account."""
    with suppress(OSError):
        _printed_note(os.getpid()).unlink()


def _printed_note(pid: int) -> Path:
    return folder() / f"printed-{os.uname().nodename}-{pid}"


def _spoken_for(part: Part) -> bool:
    if _printed_note(part.pid).exists():  # also one that could not write the end of its journal
        return False
    prints_its_own = not (part.told_by or part.account.rank or part.pid == os.getpid())
    return part.told_by == os.getpid() or (prints_its_own and not _runs(part))


def _runs(part: Part) -> bool:
    return alive(part.pid, part.since)


def _parts(own: bool) -> Iterator[Part]:
    """Summaries of the processes of this launch, from the journals on this machine; `own`: of this process too."""
    since = began()
    found = list(_written(since - _CLOCKS))
    if not found:
        return
    # Here, not at the top: this is for processes that train, or whose children do.
    from gradwatch.journal import JournalReader
    from gradwatch.journal.process_account import part_of, writer_of

    for path in found:
        try:
            if not own and writer_of(path) == os.getpid():  # to read an entry imports pydantic: 0.1 s
                continue
            part = part_of(JournalReader(path), _SECONDS / len(found))
        except OSError:  # deleted meanwhile
            continue
        if part is not None and part.host == os.uname().nodename and part.since >= since:
            yield part


def began() -> float:
    """Time at which the launch began, or the part of it whose account one process prints (Unix time in seconds)."""
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
