"""Rules with a condition on others: what they judge, step by step, and what is not known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Above, NonFinite, Spike
from gradwatch.engine import EngineState
from gradwatch.engine.conditions.bind_conditions import conditions_of
from gradwatch.records.decision import Decision
from gradwatch.rules.condition import Condition, When, circle, in_order, rules_below, when_of
from gradwatch.rules.files.rules_digest import canonical
from gradwatch.rules.rule_set import Action, Group, Rule, RuleSet
from tests.engine.cases import OptimizerRules, bound, make_snapshot, rule
from tests.engine.runs import (
    all_of,
    any_of,
    bind,
    joining,
    mostly_healthy,
    not_,
    packs,
    with_faults_that_stay,
)
from tests.support.examples import examples

HIGH = Above(of="observed.high", threshold=0.5)
WIDE = Above(of="observed.wide", threshold=0.5)


def judged(*rules: Rule, steps: str, **observed: str) -> OptimizerRules:
    """Steps with these observed values: a digit each, `_` where there is none."""
    bound_rules = OptimizerRules(bound([rule("high", HIGH), rule("wide", WIDE), *rules], size=2))
    for step in range(len(steps)):
        known = {"high": steps, **observed}
        scalars = {name: float(text[step]) for name, text in known.items() if text[step] != "_"}
        bound_rules.step(step, [1.0, 1.0], scalars=scalars)
    return bound_rules


def told(bound_rules: OptimizerRules, of: str = "joined") -> list[tuple[int, str]]:
    """(step, kind) of the events of a rule."""
    return [(event.step, event.kind) for event in bound_rules.events if event.rule == of]


def test_a_condition_fires_in_the_step_of_its_rules() -> None:
    """After all that it names, though its id comes before theirs, and is resolved when they are."""
    found = judged(joining("a", all_of("high", "wide")), steps="0110", wide="0010")
    assert told(found, "a") == [(2, "firing"), (3, "resolved")]
    assert [event.rule for event in found.events if event.step == 2] == ["wide", "a"]


def test_an_event_names_the_rules_that_hold() -> None:
    """As its place, and how many they are as its value; as a detector it is a `when`."""
    event = judged(joining("joined", any_of("high", "wide")), steps="01", wide="00").events[-1]
    assert (event.detector, event.value, event.score, event.threshold) == ("when", 1.0, 1.0, 1.0)
    assert event.summary == "when on high"


def test_an_event_names_the_parameters_of_its_rules() -> None:
    """The worst first; the deepest is the first cause; rules on the whole add none, and annotations may name one."""
    large = rule("large", Above(of="norm", threshold=5.0))
    total = rule("total", Above(of="total_norm", threshold=5.0))
    one = replace(
        joining("joined", all_of("large", "total")), annotations={"summary": "{param} and {count} on {where}"}
    )
    rules = OptimizerRules(bound([large, total, one], size=3))
    rules.step(0, [1.0, 1.0, 1.0])
    rules.step(1, [9.0, 1.0, 10.0])
    own, event = (next(each for each in rules.events if each.rule == name) for name in ("large", "joined"))
    assert (event.sites, event.count, event.first_cause) == (own.sites, 2, own.first_cause)
    assert event.summary == f"{own.sites[0]} and 2 on large, total"


@pytest.mark.parametrize(
    ("within", "first", "last"), [(1, None, None), (2, None, None), (3, 3, 3), (4, 3, 4), (9, 3, 9)]
)
def test_a_rule_holds_for_a_window(within: int, first: int | None, last: int | None) -> None:
    """From the step at which it fires until `within` steps after the last one at which it did."""
    found = judged(
        joining("joined", all_of("high", "wide"), within), steps="01000000000", wide="0001111111" + "1"
    )
    expected = [] if first is None else [(first, "firing"), ((last or 0) + 1, "resolved")]
    assert told(found) == expected


def test_a_part_has_a_window_of_its_own() -> None:
    """What explains the others may have come long before them, and goes on to explain them."""
    one = joining("joined", all_of("high", not_("wide", 9)), 3)
    assert told(judged(one, steps="000001000000", wide="010000000000")) == []
    assert told(judged(one, steps="000000000010", wide="010000000000")) == [(10, "firing")]


def test_a_window_that_closes_on_a_healthy_step_is_seen() -> None:
    """On which no rule changes, and nothing else is to be judged."""
    one = joining("joined", all_of("high", not_("wide", 4)), 9)
    found = judged(one, steps="010000000000", wide="010000000000")
    assert told(found) == [(5, "firing"), (10, "resolved")]


def test_not_of_a_rule_without_data_is_not_known() -> None:
    """Its silence is no health: what depends on it waits until that rule has judged something."""
    rules = (joining("joined", all_of("high", not_("wide"))), joining("either", any_of("high", not_("wide"))))
    found = judged(*rules, steps="0111", wide="__00")
    assert told(found) == [(2, "firing")]
    assert told(found, "either")[0] == (1, "firing")  # whatever the other says


def test_a_rule_that_warms_up_has_judged_nothing() -> None:
    """`not` of it holds from its first score on."""
    bound_rules = OptimizerRules(
        bound([rule("norm", Spike(warmup=5)), joining("joined", not_("norm"))], size=2)
    )
    for step in range(9):
        bound_rules.step(step, [1.0, 1.0])
    assert told(bound_rules) == [(5, "firing")]


def test_a_condition_on_a_condition_that_is_not_known_is_not_known() -> None:
    """`not` of a condition does not fire because that one could not."""
    rules = (joining("inner", all_of("high", not_("wide"))), joining("joined", not_("inner")))
    assert told(judged(*rules, steps="0111", wide="____"))[0][0] == 0  # as long as it does not depend on it
    assert told(judged(*rules, steps="1111", wide="____")) == []


def test_for_and_keep_firing_for_count_as_for_any_rule() -> None:
    """Pending until it held for so many steps on end, firing until it has not for so many."""
    one = joining("joined", all_of("high"), for_=2, keep_firing_for=2)
    assert told(judged(one, steps="1011000", wide="0000000")) == [
        (0, "pending"),
        (2, "pending"),
        (3, "firing"),
        (6, "resolved"),
    ]


def test_a_condition_acts_in_its_step() -> None:
    """And is the one that is told of it."""
    one = joining("joined", all_of("high", "wide"), do=(Action("stop", {}),))
    found = judged(one, steps="01", wide="01")
    assert found.decision.stop
    assert {order.rule for order in found.decision.orders} == {"joined"}
    assert judged(one, steps="01", wide="00").decision == Decision()


def test_a_condition_clips_the_total() -> None:
    """To a number, as a rule on a scalar does."""
    one = joining("joined", any_of("high"), do=(Action("clip", {"to": 0.5, "at": "step"}),))
    assert judged(one, steps="01", wide="00").decision.max_norm == 0.5


def test_a_condition_goes_on_after_a_restart() -> None:
    """Window, firing and what is known are in the saved state, through JSON."""
    rules = (rule("high", HIGH), rule("wide", WIDE), joining("joined", all_of("high", not_("wide")), 4))
    engine = bound(list(rules), size=2)
    before = OptimizerRules(engine)
    for step, high in enumerate([0.0, 1.0, 0.0]):
        before.step(step, [1.0, 1.0], scalars={"high": high, "wide": 0.0})
    saved = json.loads(json.dumps(before.state.to_dict()))
    after = OptimizerRules(engine, EngineState.from_dict(saved, engine))
    for step in (3, 4, 5):
        after.step(step, [1.0, 1.0], scalars={"high": 0.0})
    assert told(before) == [(1, "firing")]
    assert told(after) == [(5, "resolved")]


def test_a_state_of_an_earlier_version_is_read() -> None:
    """It says nothing of what has judged: known again at the first step of each rule."""
    engine = bound([rule("high", HIGH), joining("joined", not_("high"))], size=2)
    saved = engine.init().to_dict()
    del saved["judged"], saved["rules"]["joined"]
    after = OptimizerRules(engine, EngineState.from_dict(saved, engine))
    after.step(0, [1.0, 1.0])
    assert told(after) == []
    after.step(1, [1.0, 1.0], scalars={"high": 0.0})
    assert told(after) == [(1, "firing")]


def test_a_state_without_conditions_is_as_before() -> None:
    """No key more, for checkpoints that an earlier version reads."""
    engine = bound([rule("high", HIGH)], size=2)
    assert set(engine.init().to_dict()) == {"format", "lr", "baselines", "rules", "clips"}


def test_a_rule_that_matches_nothing_is_never_known() -> None:
    """A condition that needs it is inactive, with the reason; one that does not is judged without."""
    off = rule("off", Spike(), groups=("none",))
    rules = [
        rule("high", HIGH),
        off,
        joining("needs", all_of("high", "off")),
        joining("next", not_("needs")),
        joining("without", any_of("high", "off")),
    ]
    engine = bound(rules, size=2, groups=(Group("none", ("nothing.*",)),))
    assert set(engine.inactive) == {"off", "needs", "next"}
    assert engine.inactive["needs"] == "its condition can never be known to hold: no data here for 'off'"
    assert [one.rule.id for one in engine.plan.rules] == ["high", "without"]


def test_a_provisional_step_is_judged_by_conditions_on_facts_alone() -> None:
    """As by facts: what others would have said of it is not known."""
    nan = rule("nan", NonFinite())
    rules = [
        nan,
        rule("high", HIGH),
        joining("facts", all_of("nan")),
        joining("mixed", any_of("nan", "high")),
    ]
    bound_rules = OptimizerRules(bound(rules, size=2))
    bound_rules.step(0, [float("nan"), 1.0], provisional=True)
    assert [event.rule for event in bound_rules.events] == ["nan", "facts"]


def test_a_rejected_step_is_judged_by_conditions_on_the_scaler_alone() -> None:
    """For all others it did not happen."""
    low = rule("low", Above(of="scaler_skip", threshold=0.5))
    rules = [
        low,
        rule("high", HIGH),
        joining("scaler", all_of("low")),
        joining("mixed", any_of("low", "high")),
    ]
    bound_rules = OptimizerRules(bound(rules, size=2))
    bound_rules.step(0, [1.0, 1.0], scalars={"scaler_skip": 1.0, "high": 1.0})
    assert [event.rule for event in bound_rules.events] == ["low", "scaler"]


def firing_of(history: list[set[str]], rule: str, within: int) -> bool:
    """True if a rule was firing at one of the last `within` steps."""
    return any(rule in firing for firing in history[-within:])


@settings(max_examples=examples(6))
@given(st.integers(0, 10**6), st.sampled_from([mostly_healthy, with_faults_that_stay]))
def test_a_condition_is_what_its_rules_were(seed: int, run: Callable[[int], list[Any]]) -> None:
    """By the firing of the others at each step, in the words of the documentation."""
    engine = bind(packs()["conditions"])
    bound_rules, history = OptimizerRules(engine), []
    for step in run(seed):
        known = {key: value for key, value in step.items() if key not in ("step", "norms")}
        snapshot = make_snapshot(engine.sites, step["step"], step["norms"], **known)
        firing = set(bound_rules.take(snapshot).firing)
        history.append(firing)
        if snapshot.provisional:
            continue
        assert ("both" in firing) == all(firing_of(history, one, 10) for one in ("spike", "drift"))
        assert "unknown" not in firing
        if firing_of(history, "seen", 40) or not firing_of(history, "spike-total", 3):
            assert "without" not in firing


def conditions(ids: tuple[str, ...]) -> st.SearchStrategy[Condition]:
    """Conditions of any depth on these rules."""
    leaves = st.sampled_from(ids).map(lambda rule: Condition("rule", rule))
    return st.recursive(
        leaves,
        lambda parts: (
            st.builds(lambda part: Condition("not", parts=(part,)), parts)
            | st.builds(
                lambda join, some: Condition(join, parts=tuple(some)),
                st.sampled_from(["all", "any"]),
                st.lists(parts, min_size=1, max_size=3),
            )
        ),
        max_leaves=8,
    )


IDS = ("a", "b", "c")


@settings(max_examples=examples(100))
@given(conditions(IDS), st.fixed_dictionaries(dict.fromkeys(IDS, st.sampled_from([True, False, None]))))
def test_what_is_known_is_so_whatever_the_unknown(one: Condition, values: dict[str, bool | None]) -> None:
    """A condition with a value keeps it however the unknown rules turn out; and a possible value is one that can be."""
    known = one.holds(lambda rule, within: values[rule])
    outcomes = {one.holds(lambda rule, within, filled=filled: filled[rule]) for filled in _filled(values)}
    assert None not in outcomes
    if known is not None:
        assert outcomes == {known}
        bound_ = {rule for rule, value in values.items() if value is not None}
        assert one.possible(bound_.__contains__, known)
    assert when_of(canonical(RuleSet(rules=(joining("r", one),)))["rules"][0]["detect"]) == When(one)


def _filled(values: dict[str, bool | None]) -> Iterator[dict[str, bool]]:
    unknown = [rule for rule, value in values.items() if value is None]
    for number in range(2 ** len(unknown)):
        yield {
            **{rule: bool(value) for rule, value in values.items()},
            **{rule: bool(number >> place & 1) for place, rule in enumerate(unknown)},
        }


def test_conditions_come_after_those_they_name() -> None:
    """In whatever order they stand in the file; what they are about is found through them."""
    rules = {
        "late": When(all_of("middle", "x")),
        "middle": When(any_of("early", "y")),
        "early": When(not_("x")),
    }
    found = {name: when.condition for name, when in rules.items()}
    assert in_order(found) == ["early", "middle", "late"]
    assert rules_below(found, "late") == ("x", "y")
    assert circle(found, "late") == ()
    numbers = {"late": 0, "middle": 1, "early": 2, "x": 3, "y": 4}
    assert [one.number for one in conditions_of(rules, numbers)] == [2, 1, 0]


def test_a_long_way_back_is_found() -> None:
    """The ids of a circle, in order, and none for a rule that only leads into one."""
    found = {"a": all_of("b"), "b": all_of("c", "x"), "c": not_("a"), "d": any_of("a")}
    assert circle(found, "a") == ("a", "b", "c", "a")
    assert circle(found, "d") == ()


def test_not_of_a_rule_whose_baseline_began_anew_is_not_known() -> None:
    """Until its warm-up is over again."""
    rules = [
        rule("norm", Spike(warmup=5)),
        rule("high", HIGH),
        joining("joined", all_of("high", not_("norm"))),
    ]
    bound_rules = OptimizerRules(bound(rules, size=2))
    for step in range(16):
        if step == 9:
            bound_rules.state = bound_rules.engine.restarts.rebaseline(bound_rules.state, reason="why")
        high = 1.0 if step >= 10 else 0.0
        bound_rules.step(step, [1.0, 1.0], scalars={"high": high})
    assert told(bound_rules) == [(14, "firing")]
