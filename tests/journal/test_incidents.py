"""Incidents of a journal, collected in one pass whatever the order of its entries."""

from __future__ import annotations

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
    other = Event(**{**{each: getattr(pending, each) for each in pending.__slots__}, "incident": "never"})
    for number, event in enumerate((other, make_event(step=5), make_event(step=6))):
        found.take(entry(number, event))
    assert [one.name for one in found.incidents()] == ["incident-1"]
    assert found.left_out == 0
