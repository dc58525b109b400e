"""The end of a launch under `gradwatch run`: a line on stderr that says how much of its training was watched.

It is printed once for each launch (`account_with_children`), after all children were joined; of several ranks the first
prints its own. A child prints its own account if it left none where the launch looks for it, or if it outlives the
process that would have printed it. A process that is killed prints nothing: its journal has no end, and its parent's
line says so, with what the process had recorded. After `os._exit` the account is printed if the process has trained
(`os_exit`). `gradwatch audit` sums up the journals of a launch as the line would have. Needs no torch, as
`account_with_children` does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from gradwatch.account import NOTHING_TAKEN, Account, lines
from gradwatch.account.account_line import NO_TORCH, nothing_seen
from gradwatch.account.exit_reason import how_it_ends, printed_at_exit
from gradwatch.launch.account_with_children import (
    began,
    claim,
    handed_over,
    launched,
    note_printed,
    recorded,
    unnote_printed,
    with_children,
)
from gradwatch.runtime.process_identity import alive, group_rank, here
from gradwatch.runtime.standard_streams import stderr
from gradwatch.session.settings import LAUNCHED_IN, quiet_asked, told_by

_reasons: list[str] = []
_armed = [False]
_said_by: list[int] = []


def arm() -> None:
    """Note that this process may train, so that `say`, which runs after all other exit handlers, looks at it too."""
    if not _armed[0]:
        _armed[0] = True
        claim()
        printed_at_exit[0] = True


def not_watched(reason: str) -> None:
    """Keep a reason why steps were not watched; it is printed at the end, if steps are missing."""
    reason = " ".join(reason.split())
    if reason not in _reasons:
        _reasons.append(reason)


def owed() -> bool:
    """True if this process has trained, as far as it is counted, and its account is not printed yet."""
    counted = sys.modules.get("gradwatch.taps.process_totals")
    trained = counted is not None and counted.TOTALS.taken().trained
    return trained and here[0] == os.getpid() and os.getpid() not in _said_by


def goes_on() -> None:
    """Note that the process goes on, since `os.exec…` has failed: its account is to be printed once more."""
    if os.getpid() in _said_by:
        _said_by.remove(os.getpid())
        unnote_printed()


def say(account: Account | None = None, write: Callable[[str], None] = stderr.say) -> None:
    """Print the account, once for each process and in one write, so that other processes do not write in between.

    `account` is that of this process; None = as of now.
    """
    if os.getpid() in _said_by:
        return
    _said_by.append(os.getpid())
    said = list(_lines(account or account_of_process()))
    if said and not quiet_asked():
        write("\n".join(said))
        note_printed()


def _lines(own: Account) -> Iterator[str]:
    rank = group_rank()
    if rank:
        return
    if alive(own.told_by, began()) and (not own.trained_or_watched or handed_over()):
        return
    account = with_children(own)
    if rank is None and not (own.trained_or_watched or _is_first(own) or _trained_apart(account)):
        return
    if account.trained_or_watched:
        yield from lines(account, shown(account.directory))
    elif launched() and not recorded():
        yield nothing_seen(account) if "torch" in sys.modules else NO_TORCH


def _is_first(own: Account) -> bool:
    """True of rank 0, by its launcher's word."""
    return not own.rank and os.environ.get("RANK", "0") in ("", "0")


def _trained_apart(account: Account) -> bool:
    """True if processes that this one has started trained, and no rank 0 of a group elsewhere prints for them."""
    return account.counted and not (account.in_group and account.rank)


def account_of_process() -> Account:
    """The account of everything that this process did; its sessions, if there were any, have been closed."""
    watching, counted = map(sys.modules.get, ("gradwatch.session.session", "gradwatch.taps.process_totals"))
    if watching is not None:
        account: Account = watching.account_of_process()
    else:
        account = Account(NOTHING_TAKEN if counted is None else counted.TOTALS.taken(), told_by=told_by())
    reasons = tuple(dict.fromkeys((*_reasons, *account.reasons)))
    return replace(account, reasons=reasons, ended=account.ended or how_it_ends())


def shown(directory: str) -> str:
    """The path of a folder as it can be typed in the folder where `gradwatch run` was typed."""
    try:
        near = os.path.relpath(directory, os.environ.get(LAUNCHED_IN)) if directory else ""
    except (OSError, ValueError):  # the working folder is gone
        return directory
    return directory if near.startswith("..") else near
