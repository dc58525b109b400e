"""What people are notified of, by laws over random runs."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.sinks.notify.alerts import MOST_ALERTS, Alerts
from tests.support.sink_records import make_event, make_record, make_sites, skip

SITES = make_sites(2)
RULES = ("non-finite", "exploding")
TURNS = st.lists(st.tuples(st.sampled_from(RULES), st.booleans()), max_size=40)


def fired(rule: str, step: int, **fields: object) -> Record:
    return make_record(SITES, step=step, events=(make_event("firing", rule, step, **fields),))


def over(rule: str, step: int) -> Record:
    return make_record(SITES, step=step, events=(make_event("resolved", rule, step),))


@given(TURNS)
def test_what_was_said_and_what_is_agree(turns: list[tuple[str, bool]]) -> None:
    """However rules fire, are over and are reported in between: the last word on each is the state it is in."""
    alerts, firing, said = Alerts(), set[str](), dict[str, bool]()
    for step, (rule, report) in enumerate(turns):
        if rule in firing:
            firing.discard(rule)
            alerts.observe(over(rule, step))
        else:
            firing.add(rule)
            alerts.observe(fired(rule, step))
        if report:
            said.update({one.event.rule: one.resolved is None for one in alerts.news()})
            alerts.confirm(alerts.news())
            assert not alerts.news()
    said.update({one.event.rule: one.resolved is None for one in alerts.news()})
    assert {rule for rule, fires in said.items() if fires} == firing
    assert said.keys() == {rule for rule, _ in turns}


@given(TURNS, st.lists(st.tuples(st.sampled_from(RULES), st.booleans()), max_size=6))
def test_what_happens_while_a_message_is_on_its_way_is_not_lost(
    before: list[tuple[str, bool]], meanwhile: list[tuple[str, bool]]
) -> None:
    """News between the making of a message and its arrival are in the next one."""
    alerts, firing, said = Alerts(), set[str](), dict[str, bool]()
    for step, (rule, _) in enumerate(before):
        firing ^= {rule}
        alerts.observe(fired(rule, step) if rule in firing else over(rule, step))
    sent = alerts.news()
    said.update({one.event.rule: one.resolved is None for one in sent})
    for step, (rule, _) in enumerate(meanwhile, len(before)):
        firing ^= {rule}
        alerts.observe(fired(rule, step) if rule in firing else over(rule, step))
    alerts.confirm(sent)
    said.update({one.event.rule: one.resolved is None for one in alerts.news()})
    assert {rule for rule, fires in said.items() if fires} == firing


def test_a_notice_counts_and_says_what_was_done() -> None:
    """Three firings before the message are one alert, with the first event, the last step and every action."""
    alerts = Alerts()
    alerts.observe(dataclasses.replace(fired("non-finite", 3), decision=skip()))
    alerts.observe(over("non-finite", 4))
    alerts.observe(dataclasses.replace(fired("non-finite", 5), decision=skip(shadow=True)))
    (one,) = alerts.news()
    assert (one.event.step, one.last_step, one.times, one.resolved) == (3, 5, 2, None)
    assert one.actions == ("skip_step", "would skip_step")


def test_a_cause_comes_with_the_incident_it_belongs_to() -> None:
    """The finding is the cause of its own incident, not of the same rule's on another optimizer; the first is kept."""
    alerts = Alerts()
    alerts.observe(fired("non-finite", 3, incident="non-finite-0-3"))
    alerts.observe(fired("non-finite", 3, incident="non-finite-1-3", optimizer=1))
    for op in ("sqrt", "div"):
        finding = Finding("backward", "replay", step=3, op=op, rule="non-finite", incident="non-finite-1-3")
        alerts.observe(dataclasses.replace(make_record(SITES, step=4), findings=(finding,)))
    first, second = alerts.news()
    assert not first.cause
    assert "sqrt" in second.cause


def test_a_cause_that_is_found_when_all_is_over_is_still_told() -> None:
    """A search that records the next steps ends after a NaN of one step: the message not yet sent has its cause."""
    alerts = Alerts()
    alerts.observe(fired("non-finite", 3, incident="non-finite-0-3"))
    alerts.observe(over("non-finite", 4))
    finding = Finding("forward", "record", step=5, op="div", rule="non-finite", incident="non-finite-0-3")
    alerts.observe(dataclasses.replace(make_record(SITES, step=5), findings=(finding,)))
    (one,) = alerts.news()
    assert "div" in one.cause


def test_what_must_not_alert_does_not() -> None:
    """A re-fire within the cooldown and a part of another rule's incident are no news."""
    alerts = Alerts()
    assert not alerts.observe(fired("non-finite", 1, notify=False))
    assert not alerts.observe(fired("non-finite", 2, inhibited=True))
    assert not alerts.observe(over("non-finite", 3))
    assert not alerts.news()


def test_rules_below_the_severity_are_left_out() -> None:
    """Of `warning` and more, what is only information is no news, nor is its end."""
    alerts = Alerts("warning")
    assert not alerts.observe(fired("exploding", 1, severity="info"))
    assert not alerts.observe(over("exploding", 2))
    assert alerts.observe(fired("exploding", 3, severity="warning"))


def test_notices_are_bounded() -> None:
    """Rules beyond the most that are kept are counted, not kept."""
    alerts = Alerts()
    for optimizer in range(MOST_ALERTS + 3):
        alerts.observe(fired("non-finite", 1, optimizer=optimizer))
    assert (len(alerts.news()), alerts.dropped) == (MOST_ALERTS, 3)
