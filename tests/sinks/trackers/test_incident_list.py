"""The list of incidents that trackers get: bounded, safe to send again, and readable where it is shown."""

from __future__ import annotations

from gradwatch.sinks.trackers.incident_list import COLUMNS, MOST_ROWS, IncidentList
from gradwatch.sinks.trackers.points import PREFIX, Points
from tests.support.sink_records import RULES, make_event, make_record, make_sites

SITES = make_sites(4)


def test_points_that_are_sent_again_add_nothing() -> None:
    """A tracker that failed gets the same Points once more: the list has each note once, and says when it is new."""
    maker, found = Points(RULES, every=100), IncidentList()
    points = [
        maker.observe(
            make_record(SITES, step=step, events=(make_event(step=step, incident=f"non-finite-0-{step}"),))
        )
        for step in (3, 7)
    ]
    given = [point for point in points if point is not None]
    found.add(given)
    assert found.unsent
    found.sent()
    found.add(given)
    assert not found.unsent
    assert [(row[0], row[1], row[2], row[4], row[5]) for row in found.rows()] == [
        (3, "0", "non-finite", "firing", "non-finite-0-3"),
        (7, "0", "non-finite", "firing", "non-finite-0-7"),
    ]
    assert found.last_step == 7


def test_the_last_rows_are_kept_and_the_others_counted() -> None:
    """A rule that flaps for a million steps makes no table of a million rows."""
    maker, found = Points(RULES, every=100), IncidentList()
    for step in range(MOST_ROWS + 5):
        point = maker.observe(make_record(SITES, step=step, optimizer=1, events=(make_event(step=step),)))
        assert point is not None
        assert point.prefix == f"{PREFIX}optimizer_1/"
        found.add([point])
    rows = list(found.rows())
    assert [row[0] for row in rows] == list(range(5, MOST_ROWS + 5))
    assert {row[1] for row in rows} == {"1"}
    assert "5 earlier ones are left out." in found.markdown()


def test_no_name_breaks_the_table() -> None:
    """Bars, tags and lines of a rule or parameter stay in their cell."""
    name = "a|b<script>\n| x |"
    maker, found = Points((), every=1), IncidentList()
    point = maker.observe(make_record(SITES, step=1, events=(make_event(rule=name, sites=(name,), count=1),)))
    assert point is not None
    found.add([point])
    (head, _, row) = found.markdown().strip().splitlines()[-3:]
    assert head == f"| {' | '.join(COLUMNS)} |"
    assert "<" not in row
    assert row.replace("\\|", "").count("|") == len(COLUMNS) + 1
