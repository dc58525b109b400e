"""The journals of one rank of a run, and those of its other ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gradwatch.errors import GradwatchError
from gradwatch.journal.reader import JournalReader, read_journal


class RankJournals(NamedTuple):
    """`own` are the journals of `rank`, one per attempt, `others` those of the other ranks."""

    rank: int
    own: tuple[JournalReader, ...]
    others: tuple[JournalReader, ...]

    @property
    def ranks(self) -> list[int]:
        """All ranks that have a journal."""
        return sorted({self.rank, *(one.rank for one in self.others)})


def rank_journals(run: str | os.PathLike[str], rank: int | None = None) -> RankJournals:
    """Journals in the folder of a run, or the one that is named itself, which says of which rank it is.

    `rank` None is the lowest that has one: a process that trains apart may have any number. Raises GradwatchError where
    there is no journal of that rank.
    """
    where = Path(run)
    try:
        found = read_journal(where)
    except OSError as error:
        raise GradwatchError(str(error)) from None
    ranks = sorted({one.rank for one in found})
    chosen = ranks[0] if rank is None or not where.is_dir() else rank
    if chosen not in ranks:
        raise GradwatchError(f"no journal of rank {rank} in {where}; there are: {', '.join(map(str, ranks))}")
    own = tuple(one for one in found if one.rank == chosen)
    return RankJournals(chosen, own, tuple(one for one in found if one.rank != chosen))


def refuse_unread(where: Path, journals: RankJournals) -> None:
    """Raise GradwatchError where no entry was found in the journals of the rank that is shown, which have been read.

    An empty journal says nothing of what its process did: a command that went on would call that nothing.
    """
    if not all(one.unread for one in journals.own):
        return
    if not journals.others:
        raise GradwatchError(f"nothing in {where} can be read as a journal")
    others = ", ".join(str(rank) for rank in journals.ranks if rank != journals.rank)
    raise GradwatchError(
        f"nothing of rank {journals.rank} in {where} can be read as a journal; other ranks: --rank {others}"
    )
