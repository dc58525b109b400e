"""The rules that fired in a run: by the events of the shown rank, by those of other ranks, or by an account alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradwatch.account.account import summed
from gradwatch.journal import EndEntry, Entry, EventsEntry, RunEntry
from gradwatch.journal.audit import Audit, Fired
from gradwatch.journal.process_account import Recorded
from gradwatch.report.firing_periods import FiringPeriods


@dataclass(slots=True)
class OtherRank:
    """Rules that fired on a rank that is not shown: `audit` has its events and causes, `counted` is by its accounts.

    `periods` has those of each of its journals.
    """

    audit: Audit = field(default_factory=Audit)
    counted: dict[str, int] = field(default_factory=dict)
    periods: list[FiringPeriods] = field(default_factory=list)

    def take(self, entries: Iterable[Entry]) -> None:
        """Add the entries of one journal."""
        seen: set[int] = set()
        recorded = Recorded()
        periods = FiringPeriods()
        self.periods.append(periods)
        for entry in entries:
            if isinstance(entry, EventsEntry) and entry.number not in seen:
                seen.add(entry.number)
                self.audit.take_events(entry.events)
                periods.take(entry.events)
                self.audit.take_findings(entry.findings)
            elif isinstance(entry, RunEntry | EndEntry):
                recorded.take(entry)
        part = recorded.part()
        if part is not None:
            self.counted = summed([self.counted, part.account.fired])


@dataclass(frozen=True, slots=True)
class FiredOn:
    """A rule that fired, and the `rank` whose journal says so where it is not the rank that is shown."""

    fired: Fired
    rank: int | None = None


def fired_rules(
    shown: Audit, others: Mapping[int, OtherRank], severities: Mapping[str, str]
) -> dict[str, FiredOn]:
    """Every rule that fired on any rank, by its name: as the shown rank has it, else as the first rank that has it.

    An account counts firings whose events are not in the journal: their steps are -1.
    """
    found = {one.rule: FiredOn(one) for one in shown.fired()}
    for rank, other in others.items():
        for one in other.audit.fired():
            found.setdefault(one.rule, FiredOn(one, rank))
    counted: list[tuple[int | None, Mapping[str, int]]] = [(None, one.fired) for one in shown.accounts()]
    counted += [(rank, other.counted) for rank, other in others.items()]
    for by, times in counted:
        for rule, count in times.items():
            if count > 0:
                found.setdefault(rule, FiredOn(Fired(rule, severities.get(rule, ""), count), by))
    return found
