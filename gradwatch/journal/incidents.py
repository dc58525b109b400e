"""The incidents of a journal, each with its cause, what was done, and the norms of the steps around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from gradwatch.incidents.incident import AROUND, Incident, StepNorms, ordered
from gradwatch.journal.columnar_steps import StepRow, StepsEntry
from gradwatch.journal.entries import Entry, EventsEntry, RunEntry
from gradwatch.journal.reader import JournalReader
from gradwatch.journal.records_from_entries import HORIZON
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.run_info import RunInfo

AFTER = 3
"""Steps after an incident whose norms are shown with it."""


def incidents(journal: JournalReader, name: str | None = None) -> Iterator[Incident]:
    """The incident called `name`, or all whose cause was looked for, in the order they began.

    `around` lacks the steps that were thinned out of it.
    """
    found = IncidentCollector(journal.rank, name)
    for entry in journal.entries():
        found.take(entry)
    return found.incidents()


class IncidentCollector:
    """Collects the incidents of one journal, entry by entry, in one pass.

    That called `name`, or all whose cause was looked for; with `all_fired` also those of which it was not, `most` in
    all, the first ones, but a critical one takes the place of the oldest that is not: `left_out` are the others. Memory
    is bounded by `most`, where it is given, but for a number for each of these.
    """

    def __init__(
        self, rank: int, name: str | None = None, *, all_fired: bool = False, most: int | None = None
    ) -> None:
        self._rank, self._name, self._all_fired, self._most = rank, name, all_fired, most
        self._run = RunInfo("", "")
        self._events: dict[str, Event] = {}
        self._findings: dict[str, Finding] = {}
        self._times: dict[str, float] = {}
        self._left_out: set[int] = set()
        self._wanted: set[tuple[int, int]] = set()
        self._rows: dict[tuple[int, int], StepRow] = {}
        self._recent: dict[int, deque[StepRow]] = {}  # events may be written before and after their steps

    @property
    def left_out(self) -> frozenset[int]:
        """The hashes of the names of incidents beyond the `most` that are kept."""
        return frozenset(self._left_out)

    def take(self, entry: Entry) -> None:
        """Add one entry."""
        if isinstance(entry, RunEntry):
            self._run = entry.run
        elif isinstance(entry, StepsEntry):
            self._take_rows(entry)
        elif isinstance(entry, EventsEntry):
            for event in entry.events:
                self._take_event(event, entry.wall_time)
            for finding in entry.findings:
                self._take_finding(finding)

    def incidents(self) -> Iterator[Incident]:
        """The incidents so far, in the order they began."""
        for each in self._chosen():
            optimizer, step = place = _place(self._events.get(each), self._findings.get(each))
            steps = range(step - AROUND, step + AFTER + 1)
            near = {at: self._rows[optimizer, at] for at in steps if (optimizer, at) in self._rows}
            yield Incident(
                each,
                step,
                optimizer,
                self._rank,
                self._run.world_size,
                self._run.run_id,
                self._run.script,
                self._times.get(each, 0.0),
                self._run.versions,
                self._events.get(each),
                self._findings.get(each),
                ordered(near[step].decision) if place in self._rows else (),
                tuple(map(_norms, near.values())),
            )

    def _chosen(self) -> list[str]:
        known = dict.fromkeys((*self._events, *self._findings))
        if self._name is not None:
            return list(known)
        fired = {name for name, event in self._events.items() if self._all_fired and event.kind != "pending"}
        return [name for name in known if name in self._findings or name in fired]

    def _take_event(self, event: Event, wall_time: float) -> None:
        name, known = event.incident, self._events.get(event.incident)
        if self._most is not None and event.kind == "pending":
            return  # it may never fire, and would take the place of one that does
        if not name or self._name not in (None, name) or (known is not None and known.kind != "pending"):
            return
        if known is None and self._is_full(name) and not (event.severity == "critical" and self._made_room()):
            if event.kind == "firing":
                self._left_out.add(hash(name))
            return
        self._left_out.discard(hash(name))
        self._events[name], self._times[name] = event, wall_time
        if self._name is not None or self._all_fired:
            self._want(event.optimizer, event.step)

    def _made_room(self) -> bool:
        """True if the oldest incident that is not critical could be dropped."""
        oldest = next((name for name, event in self._events.items() if event.severity != "critical"), None)
        if oldest is None:
            return False
        del self._events[oldest], self._times[oldest]
        self._findings.pop(oldest, None)
        self._left_out.add(hash(oldest))
        return True

    def _take_finding(self, finding: Finding) -> None:
        name = finding.incident
        if self._name not in (None, name) or (name not in self._findings and self._is_full(name)):
            return
        if better(finding, self._findings.get(name)):
            self._findings[name] = finding
            self._want(*_place(self._events.get(name), finding))

    def _is_full(self, name: str) -> bool:
        known = name in self._events or name in self._findings
        return self._most is not None and not known and len(self._events) >= self._most

    def _want(self, optimizer: int, step: int) -> None:
        near = {(optimizer, at) for at in range(step - AROUND, step + AFTER + 1)}
        self._wanted |= near
        self._keep(optimizer, self._recent.get(optimizer, ()))

    def _take_rows(self, entry: StepsEntry) -> None:
        recent = self._recent.setdefault(entry.optimizer, deque(maxlen=HORIZON))
        recent.extend(entry.rows)
        if self._wanted:
            self._keep(entry.optimizer, entry.rows)

    def _keep(self, optimizer: int, rows: Iterable[StepRow]) -> None:
        self._rows |= {(optimizer, row.step): row for row in rows if (optimizer, row.step) in self._wanted}


def better(finding: Finding | None, than: Finding | None) -> bool:
    """True if one Finding says more than another: a cause before the loss side, that before none; not of equals."""
    return _worth(finding) > _worth(than)


def _worth(finding: Finding | None) -> int:
    return -1 if finding is None else finding.exactness


def _place(event: Event | None, finding: Finding | None) -> tuple[int, int]:
    """(optimizer, step): where it was looked for, else where it fired."""
    if event is None:
        return (0, 0 if finding is None else finding.step)
    return event.optimizer, event.step if finding is None else finding.step


def _norms(row: StepRow) -> StepNorms:
    return StepNorms(
        row.step, row.total_norm, row.total_norm_applied, row.scalars.get("loss"), row.decision.skip
    )
