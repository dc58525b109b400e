"""The incidents of a journal, each with its cause, what was done, and the norms of the steps around it."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.incidents.incident import AROUND, Incident, StepNorms, ordered
from gradwatch.journal.columnar_steps import StepRow, StepsEntry
from gradwatch.journal.entries import EventsEntry, RunEntry
from gradwatch.journal.reader import JournalReader
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.run_info import RunInfo

AFTER = 3
"""Steps after an incident whose norms are shown with it."""


def incidents(journal: JournalReader, name: str | None = None) -> Iterator[Incident]:
    """The incident called `name`, or all whose cause was looked for, in the order they began.

    Reads the journal twice. `around` lacks the steps that were thinned out of it.
    """
    run, events, findings, times = _transitions(journal, name)
    wanted = [each for each in dict.fromkeys((*events, *findings)) if name is not None or each in findings]
    places = {each: _place(events.get(each), findings.get(each)) for each in wanted}
    rows = _rows(journal, set(places.values()))
    for each in wanted:
        optimizer, step = places[each]
        steps = range(step - AROUND, step + AFTER + 1)
        near = {at: rows[optimizer, at] for at in steps if (optimizer, at) in rows}
        yield Incident(
            each,
            step,
            optimizer,
            journal.rank,
            run.world_size,
            run.run_id,
            run.script,
            times.get(each, 0.0),
            run.versions,
            events.get(each),
            findings.get(each),
            ordered(near[step].decision) if step in near else (),
            tuple(map(_norms, near.values())),
        )


def _transitions(
    journal: JournalReader, name: str | None
) -> tuple[RunInfo, dict[str, Event], dict[str, Finding], dict[str, float]]:
    """The run; by incident the first transition that was acted on or fired, the best cause found, and when."""
    run = RunInfo("", "")
    events: dict[str, Event] = {}
    findings: dict[str, Finding] = {}
    times: dict[str, float] = {}
    for entry in journal.entries():
        if isinstance(entry, RunEntry):
            run = entry.run
        if not isinstance(entry, EventsEntry):
            continue
        for event in entry.events:
            known = events.get(event.incident)
            if _concerns(event.incident, name) and (known is None or known.kind == "pending"):
                events[event.incident] = event
                times[event.incident] = entry.wall_time
        for finding in entry.findings:
            if name in (None, finding.incident) and better(finding, findings.get(finding.incident)):
                findings[finding.incident] = finding
    return run, events, findings, times


def _concerns(incident: str, name: str | None) -> bool:
    return bool(incident) and name in (None, incident)


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


def _rows(journal: JournalReader, places: set[tuple[int, int]]) -> dict[tuple[int, int], StepRow]:
    """The rows of the steps near these."""
    near = {(optimizer, step + by) for optimizer, step in places for by in range(-AROUND, AFTER + 1)}
    found: dict[tuple[int, int], StepRow] = {}
    for entry in journal.entries() if places else ():
        if isinstance(entry, StepsEntry):
            rows = ((entry.optimizer, row.step, row) for row in entry.rows)
            found |= {(optimizer, step): row for optimizer, step, row in rows if (optimizer, step) in near}
    return found


def _norms(row: StepRow) -> StepNorms:
    return StepNorms(
        row.step, row.total_norm, row.total_norm_applied, row.scalars.get("loss"), row.decision.skip
    )
