"""The processes of one launch as one account: what each left in its journals, summed.

The line that the first process of a launch prints, and what `gradwatch audit` says of it afterwards, are this sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gradwatch.account.account import Account, merged, summed, taken_by_one, total


@dataclass(frozen=True, slots=True)
class Part:
    """The account of one process from its journal; it began to record at `since` (Unix seconds).

    `account` is the one that it ended with, where it has `ended`; else what was recorded: fired, actions, `recorded`.
    `launch` is the same for all processes of one launch, "" where the process is all that is known of it; `told_by`
    the one of them that prints the account, 0 = this one.
    """

    pid: int
    host: str
    since: float
    account: Account
    ended: bool
    launch: str = ""
    told_by: int = 0


def launch_total(
    parts: Iterable[Part], runs: Callable[[Part], bool | None], own: Account | None = None
) -> Account:
    """One account for several processes, and `own`, that of this one, which has no part.

    `runs` says of a process without an end whether it still runs, None where that cannot be known. How a launch ended
    is how the process ended that prints its account.
    """
    found = list(parts)
    by_process: dict[int, list[Part]] = {}
    for part in found:
        if part.ended:
            by_process.setdefault(part.pid, []).append(part)
    # Those of the process that prints the account come last: their words are taken where there can be only one.
    ordered = sorted(by_process.values(), key=lambda each: not each[0].told_by)
    watches = [[one.account for one in each] for each in ordered]
    accounts = [merged(each, taken_by_one(each)) for each in watches]
    if own is not None:
        accounts.append(own)
    counted = [account for account in accounts if account.trained_or_watched]
    unended = {part.pid: part for part in found if not part.ended}
    fates = [runs(part) for part in unended.values()]
    unfinished = [part.account for part in found if not part.ended]
    everyone = [*accounts, *unfinished]
    return replace(
        merged(counted or accounts[-1:], total(one.taken for one in accounts)),
        fired=summed(one.fired for one in everyone),
        actions=summed(one.actions for one in everyone),
        rebaselined=summed(one.rebaselined for one in everyone),
        replaced_unfit=summed(one.replaced_unfit for one in everyone),
        reasons=tuple(dict.fromkeys(reason for one in accounts for reason in one.reasons)),
        unfit=tuple(dict.fromkeys(reason for one in accounts for reason in one.unfit)),
        directory=next((one.directory for one in reversed(everyone) if one.directory), ""),
        ended=accounts[-1].ended if accounts else "",
        rank=min((one.rank for one in everyone), default=0),
        processes=len(counted),
        lost=fates.count(False),
        running=fates.count(True),
        unknown=fates.count(None),
        recorded=sum(one.recorded for one in unfinished),
    )


def by_launch(parts: Iterable[Part]) -> list[list[Part]]:
    """The parts of each launch, in the order in which these began to record."""
    groups: dict[object, list[Part]] = {}
    for at, part in enumerate(sorted(parts, key=lambda one: one.since)):
        groups.setdefault(part.launch or at, []).append(part)
    return list(groups.values())
