"""The live view of a run from its journals, as they are written: that of one rank, and the firings of the others.

A rank has a journal for each process that has trained, and for each rule file that one of them has gone by. They are
read one after the other, so that what fired and what was counted is that of the run. Of those that were at work at the
same time (see `RunInfo.place`) the one that began last is shown, and firings of the others beside it.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from gradwatch.errors import GradwatchError
from gradwatch.journal import Entry, JournalReader, RunEntry
from gradwatch.journal.crash_safe_frames import MAGIC
from gradwatch.journal.rank_journals import rank_journals, refuse_unread
from gradwatch.records.record import CheckpointHealth
from gradwatch.report.live.view_from_journal import LiveState
from gradwatch.report.live.view_records import Firing, LiveView
from gradwatch.report.run_reader import checkpoint

MOST_OTHER_RANKS = 15
"""Ranks beside the one shown whose firings are followed."""
_NEW_SECONDS = 10.0
"""A journal that was written to less than so long ago may be about to begin."""
_LOOK_SECONDS = 2.0
"""Seconds between looks at the folder for journals that have come since."""


class _Followed:
    """The journals of one rank, followed one after the other; `waiting`: everything written so far has been read."""

    def __init__(self, journal: JournalReader) -> None:
        self._journals = [journal]
        self.state = LiveState()
        self.waiting = False
        self._entries = self._all()

    def go_on_in(self, journal: JournalReader) -> None:
        """Read this one after the others, unless it is one of them; nothing more comes in the one before it."""
        if journal.attempt > self._journals[-1].attempt:
            self._journals.append(journal)

    @property
    def is_over(self) -> bool:
        """True if what writes the last journal has closed it, or is gone."""
        return self._journals[-1].complete or self.state.gone

    @property
    def damaged(self) -> int:
        """Bytes that cannot be read, without what a process that was killed had begun to write."""
        return sum(
            one.length
            for journal in self._journals
            for one in journal.damage
            if journal.complete or one.reason != "torn"
        )

    def _all(self) -> Generator[Entry | None, None, None]:
        at = 0
        while True:
            with closing(self._journals[at].incoming(partial(self._is_over, at))) as entries:
                yield from entries
            at += 1
            while at == len(self._journals):
                yield None
            self.state.begin_another()

    def _is_over(self, at: int) -> bool:
        return at + 1 < len(self._journals) or self.state.gone

    def read(self, deadline: float) -> None:
        """Take in what is there, until `deadline` (monotonic) at most."""
        self.waiting = False
        for entry in self._entries:
            if entry is None:
                self.waiting = not self._journals[-1].in_doubt  # else the next look decides
                return
            self.state.take(entry)
            if time.monotonic() >= deadline:
                return

    def close(self) -> None:
        self._entries.close()


class JournalSource:
    """Follows a run on disk: its folder, or one of its journal files. A context manager.

    `rank` None is the lowest that has a journal. Raises GradwatchError where there is no journal of that rank, or
    nothing in it can be read as one.
    """

    def __init__(self, run: Path, rank: int | None = None) -> None:
        self._run, self._asked = run, rank
        self._own: _Followed | None = None
        self._others: dict[tuple[int, int], _Followed] = {}
        self._places: dict[int, int] = {}  # of the rank shown, by the number of the journal
        self._unfollowed = 0
        self._unread: list[str] = []
        self._weights: CheckpointHealth | None = None
        self._looked = -_LOOK_SECONDS
        self._look()

    def __enter__(self) -> JournalSource:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the journals. Idempotent."""
        for each in (self._own, *self._others.values()):
            if each is not None:
                each.close()

    def view(self, seconds: float) -> LiveView:
        """The run as of now; what was recorded before is read for at most so many seconds."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._look()
        own = self._own
        assert own is not None  # the first look raises where there is none
        own.read(now + seconds)
        for each in self._others.values():
            each.read(now + seconds)
        return own.state.view(
            str(self._run),
            time.time(),
            self._firing_elsewhere(own),
            notes=self._notes(own),
            reading=not own.waiting,
            weights_healthy=_known(self._weights),
            unfit=next(iter(self._weights.reasons), "") if self._weights is not None else "",
        )

    def _look(self) -> None:
        """Follow the last process of each rank, those beside the one shown, and whatever has begun since."""
        self._looked = time.monotonic()
        try:
            found = rank_journals(self._run, self._asked)
        except GradwatchError:
            if self._own is None:
                raise
            return  # removed under the view: what was read stays
        self._asked = found.rank
        folder = self._run if self._run.is_dir() else self._run.parent
        self._weights = checkpoint(folder).of_all
        own = sorted(found.own, key=lambda journal: journal.attempt)
        begun = list(filter(_begun, own))
        if self._own is None:
            if not begun:
                refuse_unread(self._run, found)
            self._own = _Followed(begun[0])
        for (
            journal
        ) in begun:  # one of which nothing can be read says nothing: that before it is not over by it
            self._own.go_on_in(journal)
        latest = {journal.rank: journal for journal in sorted(found.others, key=lambda one: one.attempt)}
        every = [*self._beside(begun or own), *(latest[rank] for rank in sorted(latest))]
        followed = {(journal.rank, journal.attempt): journal for journal in every[:MOST_OTHER_RANKS]}
        self._unfollowed = len(every) - len(followed)
        self._unread = [one.path.name for one in own if one not in begun]
        self._unread += [one.path.name for one in followed.values() if not (one in own or _begun(one))]
        for key in self._others.keys() - followed.keys():
            self._others.pop(key).close()
        for key, journal in followed.items():
            if key not in self._others:
                self._others[key] = _Followed(journal)

    def _beside(self, own: list[JournalReader]) -> list[JournalReader]:
        """The last journal in each other place of the rank shown, as far as they say in which they are."""
        for journal in own:
            if journal.attempt not in self._places:
                with suppress(OSError), closing(journal.entries()) as entries:
                    if isinstance(head := next(entries, None), RunEntry):
                        self._places[journal.attempt] = head.run.place
        known = {self._places[journal.attempt]: journal for journal in own if journal.attempt in self._places}
        known.pop(self._places.get(own[-1].attempt, 0), None)
        return list(known.values())

    def _firing_elsewhere(self, own: _Followed) -> list[Firing]:
        """The rules that fire on another rank, or in another process of this one, and not here, each once."""
        here = {one.rule for one in own.state.firing.values()}
        found: dict[str, Firing] = {}
        for (rank, _), each in sorted(self._others.items()):
            if rank == self._asked and each.is_over:
                continue  # of a rank that goes on
            for one in each.state.firing.values():
                if one.rule not in here and one.rule not in found:
                    found[one.rule] = Firing(
                        one.rule, one.severity, one.since, one.sites, one.count, one.actions, rank
                    )
        return list(found.values())

    def _notes(self, own: _Followed) -> list[str]:
        notes = []
        if own.damaged:
            notes.append(
                f"{own.damaged:,} bytes of the journal cannot be read: steps and firings may be missing"
            )
        notes += [
            f"nothing of {name} can be read: what its process did is not known" for name in self._unread
        ]
        if own.state.lost:
            notes.append(f"{own.state.lost:,} steps could not be written")
        notes += [
            f"weights that others have replaced were not healthy when they were last seen: {reasons}"
            for reasons in (self._weights.replaced if self._weights is not None else ())[-1:]
        ]
        if self._unfollowed:
            notes.append(f"{self._unfollowed:,} more ranks or processes are not followed")
        return notes


def _known(weights: CheckpointHealth | None) -> bool | None:
    """Health of the weights by their tag; None where they were never looked at."""
    return None if weights is None or (weights.healthy and weights.weights_step is None) else weights.healthy


def _begun(journal: JournalReader) -> bool:
    """True if something of a journal can be read, or it is so new that its first entry may be under way."""
    try:
        with closing(journal.entries()) as entries:
            if next(entries, None) is not None:
                return True
        if time.time() - journal.path.stat().st_mtime > _NEW_SECONDS:
            return False
        with journal.path.open("rb") as file:
            return MAGIC.startswith(file.read(len(MAGIC)))
    except OSError:
        return False
