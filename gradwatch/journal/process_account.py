"""Summary of the process that wrote a journal: the account of its end, or what was recorded until it broke off."""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf
from pathlib import Path

from gradwatch.account import Account
from gradwatch.account.launch_total import Part
from gradwatch.journal.columnar_steps import StepsEntry
from gradwatch.journal.crash_safe_frames import Damage
from gradwatch.journal.entries import EndEntry, Entry, EventsEntry, RunEntry
from gradwatch.journal.payload import decode_payload
from gradwatch.journal.reader import JournalReader, opened
from gradwatch.records.columns import OBSERVED_ONLY
from gradwatch.records.decision import Order
from gradwatch.records.run_info import RunInfo


class Recorded:
    """Counts the steps, firings and actions of one journal, entry by entry; lower bounds where it was thinned."""

    def __init__(self) -> None:
        self.run: RunInfo | None = None
        self._steps = 0
        self._fired: dict[str, int] = {}
        self._actions: dict[str, int] = {}
        self._rebaselined: dict[str, int] = {}
        self._known: set[int] = set()  # events are written again where a file was lost
        self._account: Account | None = None

    def take(self, entry: Entry) -> None:
        """Add one entry."""
        if isinstance(entry, StepsEntry):
            for row in entry.rows:
                self._steps += not row.scalars.get("scaler_skip") and OBSERVED_ONLY not in row.scalars
                if row.decision.orders:
                    self._act(row.decision.orders)
        elif isinstance(entry, EventsEntry) and entry.number not in self._known:
            self._known.add(entry.number)
            for event in entry.events:
                counts = {"firing": self._fired, "rebaselined": self._rebaselined}.get(event.kind)
                if counts is not None:
                    name = event.rule or event.summary
                    counts[name] = counts.get(name, 0) + 1
        elif isinstance(entry, RunEntry):
            self.run = entry.run
        elif isinstance(entry, EndEntry) and entry.account:
            with suppress(ValueError):  # what cannot be read is as if it was not given
                self._account = Account.from_dict(entry.account)

    def _act(self, orders: frozenset[Order]) -> None:
        for action in {order.action for order in orders if not order.shadow}:
            self._actions[action] = self._actions.get(action, 0) + 1

    def part(self) -> Part | None:
        """The summary from the entries so far; None where none says who wrote them."""
        run = self.run
        if run is None:
            return None
        account = self._account or Account(
            fired=self._fired,
            actions=self._actions,
            rebaselined=self._rebaselined,
            directory=run.directory,
            rank=run.rank,
            recorded=self._steps,
        )
        ended = self._account is not None
        return Part(run.pid, run.host, run.start_time, account, ended, run.launch, run.told_by)


def writer_of(path: Path) -> int:
    """The id of the process that wrote a journal, without a check of the rest; -1 where the file does not say.

    Raises OSError where it cannot be read.
    """
    with opened(path) as scanner:
        head = scanner.read()
    if head is None or isinstance(head, Damage):
        return -1
    try:
        return int(decode_payload(head.payload).fields["run"]["pid"])
    except (ValueError, TypeError, LookupError):  # it is damaged, or of another version
        return -1


def part_of(journal: JournalReader, seconds: float = inf) -> Part | None:
    """Read the summary of the process of a journal. One without an end is read for so many seconds at most.

    Raises OSError where it cannot be read, as when it was deleted.
    """
    found = Recorded()
    end = journal.end()
    if end is not None:
        found.take(end)
    deadline = time.monotonic() + seconds
    for entry in journal.entries():
        found.take(entry)
        if time.monotonic() > deadline or (end is not None and end.account and found.run is not None):
            break
    return found.part()
