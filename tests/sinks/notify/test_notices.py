"""What people are notified of, by laws over random runs."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.sinks.notify.notices import MOST_NOTICES, Notices
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
    notices, firing, said = Notices(), set[str](), dict[str, bool]()
    for step, (rule, report) in enumerate(turns):
        if rule in firing:
            firing.discard(rule)
            notices.observe(over(rule, step))
        else:
            firing.add(rule)
            notices.observe(fired(rule, step))
        if report:
            said.update({one.event.rule: one.resolved is None for one in notices.news()})
            notices.confirm(notices.news())
            assert not notices.news()
    said.update({one.event.rule: one.resolved is None for one in notices.news()})
    assert {rule for rule, fires in said.items() if fires} == firing
    assert said.keys() == {rule for rule, _ in turns}


@given(TURNS, st.lists(st.tuples(st.sampled_from(RULES), st.booleans()), max_size=6))
def test_what_happens_while_a_message_is_on_its_way_is_not_lost(
    before: list[tuple[str, bool]], meanwhile: list[tuple[str, bool]]
) -> None:
    """News between the making of a message and its arrival are in the next one."""
    notices, firing, said = Notices(), set[str](), dict[str, bool]()
    for step, (rule, _) in enumerate(before):
        firing ^= {rule}
        notices.observe(fired(rule, step) if rule in firing else over(rule, step))
    sent = notices.news()
    said.update({one.event.rule: one.resolved is None for one in sent})
    for step, (rule, _) in enumerate(meanwhile, len(before)):
        firing ^= {rule}
        notices.observe(fired(rule, step) if rule in firing else over(rule, step))
    notices.confirm(sent)
    said.update({one.event.rule: one.resolved is None for one in notices.news()})
    assert {rule for rule, fires in said.items() if fires} == firing


def test_a_notice_counts_and_says_what_was_done() -> None:
    """Three firings before the message are one notice, with the first event, the last step and every action."""
    notices = Notices()
    notices.observe(dataclasses.replace(fired("non-finite", 3), decision=skip()))
    notices.observe(over("non-finite", 4))
    notices.observe(dataclasses.replace(fired("non-finite", 5), decision=skip(shadow=True)))
    (one,) = notices.news()
    assert (one.event.step, one.last_step, one.times, one.resolved) == (3, 5, 2, None)
    assert one.actions == ("skip_step", "would skip_step")


def test_a_cause_comes_with_the_rule_it_belongs_to() -> None:
    """The finding of the step is the notice's cause, in the words of `gradwatch explain`; the first is kept."""
    notices = Notices()
    finding = Finding("backward", "replay", step=3, op="sqrt", rule="non-finite")
    notices.observe(dataclasses.replace(fired("non-finite", 3), findings=(finding,)))
    (one,) = notices.news()
    assert "sqrt" in one.cause


def test_what_must_not_alert_does_not() -> None:
    """A re-fire within the cooldown and a part of another rule's incident are no news."""
    notices = Notices()
    assert not notices.observe(fired("non-finite", 1, notify=False))
    assert not notices.observe(fired("non-finite", 2, inhibited=True))
    assert not notices.observe(over("non-finite", 3))
    assert not notices.news()


def test_rules_below_the_severity_are_left_out() -> None:
    """Of `warning` and more, what is only information is no news, nor is its end."""
    notices = Notices("warning")
    assert not notices.observe(fired("exploding", 1, severity="info"))
    assert not notices.observe(over("exploding", 2))
    assert notices.observe(fired("exploding", 3, severity="warning"))


def test_notices_are_bounded() -> None:
    """Rules beyond the most that are kept are counted, not kept."""
    notices = Notices()
    for optimizer in range(MOST_NOTICES + 3):
        notices.observe(fired("non-finite", 1, optimizer=optimizer))
    assert (len(notices.news()), notices.dropped) == (MOST_NOTICES, 3)
