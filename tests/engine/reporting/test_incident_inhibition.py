"""One spike is one alarm: rules that find what another one reports already belong to its incident."""

from __future__ import annotations

from typing import Any

import pytest

from gradwatch.detectors import Above, Spike
from gradwatch.records.event import Event
from gradwatch.rules.rule_set import Action, Rule
from tests.engine.cases import OptimizerRules, bound, rule

TOTAL = rule("z-total", Spike(of="total_norm", above=6), severity="critical")
EACH = rule("each", Spike(factor=4.0), scope="param", inhibited_by=("z-total",))
SPIKE = [100.0, 1.0, 1.0, 1.0]


def events_of(rules: list[Rule], *last: list[float]) -> dict[str, Event]:
    """The first Event of each rule by id, where norms of 1 are followed by these."""
    watched = OptimizerRules(bound(rules))
    for step in range(60):
        watched.step(step, [1.0] * 4)
    for step, norms in enumerate(last, 60):
        watched.step(step, norms)
    return {event.rule: event for event in reversed(watched.events) if event.kind == "firing"}


def test_the_parameter_that_moved_the_total_is_no_second_alarm() -> None:
    """Its rule fires, within the incident of the total, which names the parameter."""
    found = events_of([EACH, TOTAL], SPIKE)
    assert (found["z-total"].notify, found["z-total"].first_cause) == (True, "layers.0.weight")
    assert (found["each"].notify, found["each"].inhibited) == (False, True)
    assert found["each"].incident == found["z-total"].incident == "z-total-0-60"


def test_all_of_them_are_no_second_alarm() -> None:
    """Where every parameter jumped with the total, that is one fact."""
    found = events_of([EACH, TOTAL], [100.0, 110.0, 90.0, 95.0])
    assert (found["z-total"].first_cause, found["each"].inhibited) == ("", True)


def test_another_parameter_is_an_alarm_of_its_own() -> None:
    """One that jumps without moving the total, beside one that moves it, which the rule is not about."""
    apart = rule(
        "each", Spike(factor=4.0), scope="param", inhibited_by=("z-total",), exclude=("layers.0.weight",)
    )
    levels = rule("levels", Spike(above=1e6), scope="param")
    found = events_of([apart, levels, TOTAL], [1000.0, 9.0, 1.0, 1.0])
    assert found["z-total"].first_cause == "layers.0.weight"
    assert (found["each"].notify, found["each"].incident) == (True, "each-0-60")


@pytest.mark.parametrize("keys", [{"severity": "warning"}, {"for_": 2}])
def test_one_that_is_milder_or_does_not_fire_inhibits_nothing(keys: dict[str, Any]) -> None:
    """An alarm is left out only for one that is there, and as grave."""
    other = rule("z-total", Spike(of="total_norm", above=6), **keys)
    each = rule("each", Spike(factor=4.0), scope="param", inhibited_by=("z-total",), severity="critical")
    assert not events_of([each, other], SPIKE)["each"].inhibited


def test_a_rule_that_acts_reports_what_it_did() -> None:
    """Whoever else fires: a gradient was changed."""
    acting = rule(
        "each", Spike(), scope="param", inhibited_by=("z-total",), do=(Action("clip", {"to": "baseline"}),)
    )
    found = events_of([acting, TOTAL], SPIKE)
    assert (found["each"].notify, found["each"].inhibited) == (True, False)


def test_the_end_of_an_inhibited_rule_is_none_of_its_own() -> None:
    """Its resolved Event belongs to the same incident; the next time it fires alone is an alarm."""
    watched = OptimizerRules(bound([EACH, rule("z-total", Above(of="total_norm", threshold=50.0))]))
    for step in range(60):
        watched.step(step, [1.0] * 4)
    for step, norms in enumerate((SPIKE, [1.0] * 4, [20.0, 1.0, 1.0, 1.0]), 60):
        watched.step(step, norms)
    found = [(event.step, event.kind, event.inhibited) for event in watched.events if event.rule == "each"]
    assert found[:2] == [(60, "firing", True), (61, "resolved", True)]


def test_a_chain_is_judged_from_its_end() -> None:
    """Each after those that inhibit it, whatever the order of their ids."""
    rules = [
        rule("a", Spike(of="total_norm", above=6), inhibited_by=("b",)),
        rule("b", Spike(of="total_norm", above=7), inhibited_by=("c",)),
        rule("c", Spike(of="total_norm", above=8)),
    ]
    found = events_of(rules, SPIKE)
    assert [found[name].incident for name in "abc"] == ["c-0-60"] * 3
    assert [found[name].notify for name in "abc"] == [False, False, True]


@pytest.mark.parametrize("every", [1, 3])
def test_what_fires_on_after_the_other_has_resolved_is_an_alarm(every: int) -> None:
    """The rule on the total has learned the new level; what is beyond a fixed bound is told then."""
    high = rule("high", Above(threshold=5.0), scope="param", inhibited_by=("z-total",), every=every, for_=1)
    passing = rule("z-total", Above(of="total_norm", threshold=50.0))
    watched = OptimizerRules(bound([high, passing]))
    for step, norms in enumerate(
        [[1.0] * 4] * 60 + [[100.0, 1.0, 1.0, 1.0]] * 6 + [[20.0, 1.0, 1.0, 1.0]] * 30
    ):
        watched.step(step, norms)
    found = [(event.kind, event.notify, event.inhibited) for event in watched.events if event.rule == "high"]
    assert found == [("firing", False, True), ("firing", True, False)]
    told = next(event for event in watched.events if event.rule == "high" and event.notify)
    assert told.incident == f"high-0-{told.step}"
    assert 66 <= told.step < 66 + every


def test_what_fires_on_may_belong_to_a_third() -> None:
    """Of a chain the next one reports it; the last is no alarm of its own."""
    low, middle = (
        rule(name, Above(threshold=5.0), scope="param", inhibited_by=by, for_=1)
        for name, by in (("low", ("middle",)), ("middle", ("z-total",)))
    )
    watched = OptimizerRules(bound([low, middle, rule("z-total", Above(of="total_norm", threshold=50.0))]))
    for step, norms in enumerate(
        [[1.0] * 4] * 60 + [[100.0, 1.0, 1.0, 1.0]] * 3 + [[20.0, 1.0, 1.0, 1.0]] * 3
    ):
        watched.step(step, norms)
    loud = [event.rule for event in watched.events if event.kind == "firing" and event.notify]
    assert loud == ["z-total", "middle"]
