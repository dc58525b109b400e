"""Incidents of a journal, collected in one pass whatever the order of its entries."""

from __future__ import annotations

import dataclasses

from gradwatch.journal import EventsEntry, StepsEntry
from gradwatch.journal.columnar_steps import step_row
from gradwatch.journal.incidents import IncidentCollector
from gradwatch.records.event import Event
from tests.support.sink_records import make_event, make_record, make_sites

SITES = make_sites(2)


def rows(first: int, last: int) -> StepsEntry:
    return StepsEntry(0, 0, [step_row(make_record(SITES, step=step), {}) for step in range(first, last)])


def entry(number: int, *events: Event) -> EventsEntry:
    return EventsEntry(number, 0, events[0].step, 0.0, events)


def test_steps_before_and_after_their_events() -> None:
    """The norms around an incident are found in steps written before it, and in those written after it."""
    found = IncidentCollector(0, "incident-1")
    for each in (rows(0, 12), entry(0, make_event(step=10)), rows(12, 20)):
        found.take(each)
    (incident,) = found.incidents()
    assert [one.step for one in incident.around] == list(range(2, 14))


def test_pending_takes_no_place() -> None:
    """Of so many incidents at most, those that never fired are none."""
    found = IncidentCollector(0, all_fired=True, most=1)
    pending = make_event("pending", "exploding", 1)
    other = dataclasses.replace(pending, incident="never")
    for number, event in enumerate((other, make_event(step=5), make_event(step=6))):
        found.take(entry(number, event))
    assert [one.name for one in found.incidents()] == ["incident-1"]
    assert not found.left_out


def test_a_critical_incident_takes_the_place_of_the_oldest_that_is_not() -> None:
    """Those that had to go are counted with those that never had a place; critical ones stay."""
    found = IncidentCollector(0, all_fired=True, most=3)
    severities = ["warning", "critical", "info", "warning", "critical", "critical", "critical"]
    for step, severity in enumerate(severities):
        found.take(entry(step, named(f"i-{step}", step, severity)))
        found.take(rows(step, step + 1))
    kept = list(found.incidents())
    assert [one.name for one in kept] == ["i-1", "i-4", "i-5"]
    assert len(found.left_out) == 4
    assert [one.step for one in kept[1].around] == [0, 1, 2, 3, 4, 5, 6]


def named(name: str, step: int, severity: str) -> Event:
    return dataclasses.replace(make_event(step=step, severity=severity), incident=name)
