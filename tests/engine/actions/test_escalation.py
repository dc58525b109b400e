"""The ladder of a rule: k in n, cap, cooldown; and who is told."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwatch
from gradwatch.detectors import Above, NonFinite, Spike
from gradwatch.engine.actions.escalation import climbed, remembered
from gradwatch.engine.firing import IDLE
from gradwatch.engine.rule_plan import RulePlan
from gradwatch.errors import TrainingStopped
from gradwatch.records.event import Event
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import Action
from tests.engine.cases import OptimizerRules, bound, rule
from tests.support.acting_cases import Training, kinds, orders, watched
from tests.support.examples import examples

LADDER = """
rules:
  r:
    detect: {kind: above, threshold: 5}
    do:
      - clip: {to: 0.5}
      - escalate: {after: 2 in 4, to: skip_step}
      - escalate: {after: 3 in 10, to: stop}
"""
SPIKE = {"2__weight": 1000.0}


def rung(after: str, to: str) -> Action:
    return Action("escalate", {"after": after, "to": to})


def plan_of(*do: Action) -> RulePlan:
    return bound([rule("r", Above(threshold=1.0), do=do)]).plan.rules[0]


def test_a_stop_after_skips_in_a_row_says_so() -> None:
    """The key of the rule that made it stop, with its number; a rule whose `do:` has stop needs no reason."""
    text = """
rules:
  r: {detect: {kind: nonfinite}, do: [skip_step: {max_consecutive: 2, then: stop}]}
"""
    training = Training()
    with watched(training, text):
        training.step()
        for _ in range(2):
            training.step(all=math.nan)
        with pytest.raises(
            TrainingStopped, match=r"rule r \(2 steps skipped in a row, then: stop\) says stop"
        ):
            training.step(all=math.nan)


def test_clip_then_skip_then_stop() -> None:
    """The first spike is clipped, the second within four steps is skipped too, the third within ten stops."""
    training = Training()
    heard: list[Event] = []
    with watched(training, LADDER, on_escalate=heard.append) as (_, kept):
        training.step(**SPIKE)
        assert set(orders(kept.records[-1])) == {"clip"}
        training.step()
        training.step(**SPIKE)
        assert set(orders(kept.records[-1])) == {"skip_step"}  # a skipped step is not clipped
        assert kept.records[-1].decision.skip
        assert (kept.records[-1].snapshot.coef == 1).all()
        for _ in range(4):
            training.step()
        before = training.weights()
        with pytest.raises(TrainingStopped, match=r"rule r \(escalate: 3 in 10, to: stop\) says stop"):
            training.step(**SPIKE)
        assert all(torch.equal(a, b) for a, b in zip(training.weights(), before, strict=True))
    assert [(event.step, event.actions) for event in heard] == [
        (2, ("skip_step",)),
        (7, ("stop",)),
    ]
    assert {event.severity for event in heard} == {"critical"}
    assert [one for one in kinds(kept) if one[1] == "escalated"] == [(2, "escalated"), (7, "escalated")]


def test_the_rung_ends_with_its_window() -> None:
    """Spikes too far apart are clipped, and never more than clipped."""
    training = Training()
    with watched(training, LADDER.replace("3 in 10", "3 in 9")) as (_, kept):
        for _ in range(6):
            training.step(**SPIKE)
            for _ in range(4):
                training.step()
    assert {frozenset(orders(record)) for record in kept.records} == {frozenset(), frozenset({"clip"})}


@given(
    acted=st.lists(st.booleans(), min_size=1, max_size=40),
    ladder=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=3),
)
def test_a_rung_stands_exactly_while_k_of_the_last_n_steps_were_acted_on(
    acted: list[bool], ladder: list[tuple[int, int]]
) -> None:
    """However short the memory that is kept of it."""
    names = ("clip", "skip_step", "stop")
    pairs = [(k, k + more, name) for (k, more), name in zip(ladder, names, strict=False)]
    one = plan_of(*(rung(f"{k} in {n}", name) for k, n, name in pairs))
    track = IDLE
    for step, acts in enumerate(acted):
        if acts:
            track = remembered(one, track, step)
        expected = [name for k, n, name in pairs if sum(acted[max(0, step - n + 1) : step + 1]) >= k]
        assert list(climbed(one, track, step)) == expected
    assert len(track.acted) <= max(k for k, _, _ in pairs)


def test_a_callback_that_fails_is_counted_and_training_goes_on() -> None:
    """Its exception stays out of training; the rung holds all the same."""

    def broken(event: Event) -> None:
        raise KeyError("no such checkpoint")

    training = Training()
    with watched(training, LADDER, on_escalate=broken, strict=False) as (gw, kept):
        training.step(**SPIKE)
        training.step(**SPIKE)
        assert gw.health.errors() == {"on_escalate": 1}
        assert kept.records[-1].decision.skip


def test_a_callback_may_stop_training() -> None:
    """`TrainingStopped` from the callback is a stop like any other: recorded, then raised; the weights stay."""

    def enough(event: Event) -> None:
        raise TrainingStopped("the learning rate has been halved three times")

    training = Training()
    with watched(training, LADDER, on_escalate=enough) as (_, kept):
        training.step(**SPIKE)
        before = training.weights()
        with pytest.raises(TrainingStopped):
            training.step(**SPIKE)
        assert kept.records[-1].decision.stop
        assert all(torch.equal(a, b) for a, b in zip(training.weights(), before, strict=True))


def test_a_callback_can_back_the_learning_rate_off_in_that_very_step() -> None:
    """It runs before the optimizer does."""
    training = Training()

    def halve(event: Event) -> None:
        training.optimizer.param_groups[0]["lr"] *= 0.5

    text = LADDER.replace("to: skip_step", "to: clip")
    with watched(training, text, on_escalate=halve):
        training.step(**SPIKE)
        training.backward(**SPIKE)
        before = training.weights()
        training.optimizer.step()
    for old, param in zip(before, training.model.parameters(), strict=True):
        assert param.grad is not None
        assert torch.allclose(param, old - 0.5e-3 * param.grad, rtol=1e-6, atol=1e-9)


def test_shadow_climbs_in_words_only() -> None:
    """No callback, no action; what the rung would have done is recorded."""
    training = Training()
    heard: list[Event] = []
    text = LADDER.replace("    do:", "    mode: shadow\n    do:")
    with watched(training, text, on_escalate=heard.append) as (_, kept):
        for _ in range(3):
            training.step(**SPIKE)
    assert not heard
    assert [{order.action for order in record.decision.orders} for record in kept.records] == [
        {"clip"},
        {"skip_step"},
        {"skip_step", "stop"},
    ]
    assert all(order.shadow for record in kept.records for order in record.decision.orders)


@pytest.mark.parametrize("then", ["continue", "stop"])
def test_max_consecutive_never_lets_a_nan_pass(then: str) -> None:
    """After the cap it stops, or goes on skipping with a second critical incident: it never accepts the NaN."""
    training = Training()
    text = f"""
rules:
  r: {{detect: {{kind: nonfinite}}, do: [skip_step: {{max_consecutive: 3, then: {then}}}]}}
"""
    with watched(training, text) as (_, kept):
        training.step()
        before = training.weights()
        stopped = 0
        for _ in range(7):
            try:
                training.step(**{"0__bias": math.nan})
            except TrainingStopped:
                stopped += 1
                break
        assert all(torch.equal(a, b) for a, b in zip(training.weights(), before, strict=True))
    alarms = [
        event.step
        for record in kept.records
        for event in record.verdict.events
        if event.kind == "repeat" and event.notify
    ]
    # A step at which training stops is not taken: it is not told as skipped too, nor counted so.
    assert set(orders(kept.records[-1])) == ({"stop"} if then == "stop" else {"skip_step"})
    assert (stopped, alarms) == ((1, [4]) if then == "stop" else (0, [4, 7]))


def test_cooldown_delays_the_alert_and_not_the_action() -> None:
    """A second spike within the cooldown reopens the incident without a new alert, and is clipped like the first."""
    training = Training()
    text = "rules: {r: {detect: {kind: above, threshold: 5}, cooldown: 10, do: [clip: {to: 0.5}]}}"
    with watched(training, text) as (_, kept):
        for scale in (SPIKE, {}, SPIKE, {}):
            training.step(**scale)
    told = [event for record in kept.records for event in record.verdict.events if event.kind == "firing"]
    assert [event.notify for event in told] == [True, False]
    assert told[0].incident == told[1].incident
    assert [record.decision.coef is not None for record in kept.records] == [True, False, True, False]


def test_escalated_skips_are_not_learned() -> None:
    """A step that the ladder skips for a NaN teaches no baseline, as one skipped at once does not."""
    quick = rule("nan", NonFinite(), do=(Action("skip_step", {"max_consecutive": None, "then": "continue"}),))
    slow = rule("nan", NonFinite(), do=(rung("1 in 1", "skip_step"),))
    found: list[Any] = []
    for nan in (quick, slow):
        bound_rules = OptimizerRules(bound([nan, rule("spike", Spike(of="total_norm"), scope="total")]))
        for step in range(40):
            bound_rules.step(step, [1.0, 2.0, math.nan if step == 30 else 1.0, 1.0])
        found.append(bound_rules.state.to_dict()["baselines"])
    assert found[0] == found[1]


@settings(max_examples=examples(15))
@given(st.text(alphabet="0123456789 in", max_size=12))
def test_what_is_no_pace_is_refused_with_its_place(after: str) -> None:
    """`after:` is `k in n` with k <= n, anything else an error at its line."""
    head = "version: 1\nrules:\n  r:\n    detect: {kind: nonfinite}\n    do:\n"
    text = f"{head}      - escalate: {{after: {after!r}, to: stop}}\n"
    found = re.fullmatch(r"([1-9]\d{0,3}) in ([1-9]\d{0,5})", after)
    if found and int(found[1]) <= int(found[2]):
        assert parse_rules(text).rules[0].do[0].params["after"] == after
        return
    with pytest.raises(gradwatch.RuleFileError) as refused:
        parse_rules(text)
    assert refused.value.problems[0].line == 6
