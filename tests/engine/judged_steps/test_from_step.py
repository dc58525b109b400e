"""`from_step`: before it a rule learns and says nothing; at it and after it judges as if it had always been there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Above, Below, LossNonFinite, NonFinite, Spike
from gradwatch.engine import EngineState
from gradwatch.records.verdict import Verdict
from gradwatch.rules.rule_set import Action, Rule
from tests.engine.cases import OptimizerRules, bound, make_snapshot, rule
from tests.engine.fast_path.test_many_steps import see_the_same, snapshots_of
from tests.engine.runs import (
    DISTINCT,
    SIZE,
    all_of,
    any_of,
    bind,
    joining,
    mostly_healthy,
    not_,
    packs,
    with_costly_columns_that_stay,
    with_faults_that_stay,
)
from tests.support.examples import examples

RUNS = [mostly_healthy, with_faults_that_stay, with_costly_columns_that_stay]
HIGH = rule("high", Above(of="total_norm", threshold=10.0), from_step=5)
LOUD, CALM = [50.0] * SIZE, [1.0] * SIZE


def watched(*rules: Rule, state: EngineState | None = None) -> OptimizerRules:
    """These rules, bound; they go on from the state of others."""
    engine = bound(list(rules), SIZE)
    return OptimizerRules(engine, None if state is None else EngineState.from_dict(state.to_dict(), engine))


def test_it_fires_at_its_first_step_and_not_before() -> None:
    """A breach at every step fires at that step, and nothing was pending."""
    run = watched(HIGH, replace(HIGH, id="slow", for_=3))
    for step in range(9):
        run.step(step, LOUD)
    assert run.kinds == [(5, "firing", "high"), (5, "pending", "slow"), (7, "firing", "slow")]


def test_its_baseline_is_learned_before_it() -> None:
    """A spike at the first step that it judges is measured by the steps before."""
    run = watched(rule("spike", Spike(of="total_norm", above=6), warmup=20, from_step=30))
    for step in range(30):
        run.step(step, CALM if step != 25 else LOUD)
    run.step(30, LOUD)
    assert run.kinds == [(30, "firing", "spike")]


def test_its_actions_begin_with_it() -> None:
    """No step is skipped before, in shadow mode or not, and a ladder counts no step of then."""
    skip, ladder = (Action("skip_step", {}),), (Action("escalate", {"after": "3 in 9", "to": "stop"}),)
    run = watched(replace(HIGH, do=skip + ladder), replace(HIGH, id="shadow", do=skip, mode="shadow"))
    skipped, stopped, shadow = [], [], []
    for step in range(9):
        run.step(step, LOUD)
        skipped += [step] * run.decision.skip
        stopped += [step] * run.decision.stop
        shadow += [step] * any(order.shadow for order in run.decision.orders)
    assert skipped == [5, 6, 7, 8]
    assert stopped == [7, 8]
    assert shadow == [5, 6, 7, 8]


def test_a_condition_waits_for_its_own_first_step() -> None:
    """It holds all along, and fires when it is reached though no other rule changes, after steps judged at a glance."""
    seen = rule("seen", Above(of="total_norm", threshold=1e9))
    run = watched(seen, joining("calm", not_("seen"), from_step=40), joining("chain", all_of("calm"), 2))
    for step in range(50):
        run.step(step, CALM)
    assert run.kinds == [(40, "firing", "calm"), (40, "firing", "chain")]


def test_a_condition_does_not_know_of_a_rule_before_its_first_step() -> None:
    """`not` of what has judged nothing is no reason to fire."""
    run = watched(HIGH, joining("quiet", not_("high")), joining("either", any_of("high", not_("quiet"))))
    for step in range(9):
        run.step(step, CALM)
    assert run.kinds == [(5, "firing", "quiet")]


@pytest.mark.parametrize("known", [{"scalars": {"scaler_skip": 1.0}}, {"provisional": True}])
def test_a_first_step_that_is_not_judged_is_made_up_for(known: dict[str, object]) -> None:
    """Rejected by a GradScaler, or provisional: the rules are asked at the next one."""
    seen = rule("seen", Above(of="total_norm", threshold=1e9))
    scaler = rule("scaler", Above(of="scaler_skip", threshold=7.0))
    run = watched(HIGH, seen, scaler, joining("calm", not_("seen"), from_step=5))
    for step in range(9):
        run.step(step, LOUD, **(known if step == 5 else {}))
    assert run.kinds == [(6, "firing", "high"), (6, "firing", "calm")]


def test_a_step_that_was_rejected_counts() -> None:
    """It has a number, as events show it; a rule on the loss of such steps waits for its own step too."""
    nan = {"scaler_skip": 1.0, "loss": float("nan")}
    run = watched(rule("nan", LossNonFinite(), from_step=3), HIGH)
    for step in range(9):
        run.step(step, LOUD, scalars=nan if step < 5 else {})
    assert run.kinds == [(3, "firing", "nan"), (5, "firing", "high")]


def test_what_fires_is_resolved_where_its_first_step_is_moved_behind() -> None:
    """A rule file that is read anew: it ends at the next step, and fires again at its new first step."""
    run = watched(replace(HIGH, from_step=0))
    run.step(0, LOUD)
    run = watched(HIGH, state=run.state)
    for step in range(1, 7):
        run.step(step, LOUD)
    assert run.kinds == [(1, "resolved", "high"), (5, "firing", "high")]


def test_a_job_that_is_resumed_goes_on() -> None:
    """The state has no step of its own: the number of the step decides, before and after its first step."""
    for end in (3, 7):
        run = watched(HIGH)
        for step in range(end):
            run.step(step, LOUD)
        again = watched(HIGH, state=run.state)
        for step in range(end, 9):
            again.step(step, LOUD)
        assert run.kinds + again.kinds == [(5, "firing", "high")]


def test_a_job_that_goes_back_waits_again() -> None:
    """Steps that begin anew are before it."""
    run = watched(HIGH)
    run.step(7, LOUD)
    for step in range(7):
        run.step(step, LOUD)
    assert run.kinds == [(7, "firing", "high"), (0, "resolved", "high"), (5, "firing", "high")]


def test_nan_before_it_is_left_to_other_rules() -> None:
    """A rule on what is not finite that waits keeps no other one silent."""
    run = watched(rule("nan", NonFinite(), from_step=5), rule("high", Above(of="total_norm", threshold=10.0)))
    run.step(0, [float("nan")] * SIZE)
    assert run.kinds == [(0, "firing", "high")]


def started(rules: tuple[Rule, ...], seed: int) -> tuple[Rule, ...]:
    """The rules, most of them with a first step in the midst of the run."""
    rng = np.random.default_rng(seed)
    return tuple(replace(one, from_step=int(rng.choice([0, 1, 37, 90, 91, 200, 10**6]))) for one in rules)


@pytest.mark.parametrize("pack", DISTINCT)
@settings(max_examples=examples(3))
@given(st.integers(0, 10**6), st.sampled_from(RUNS), st.sampled_from([1, 10, 7, 10**6]))
def test_a_block_sees_what_single_steps_see(pack: str, seed: int, run: object, columns_every: int) -> None:
    """Cut anywhere, blocks over the first steps of rules give the events and states of one step after the other."""
    engine = bind(started(packs()[pack], seed))
    see_the_same(engine, snapshots_of(engine, run(seed), columns_every), seed)  # type: ignore[operator]


@pytest.mark.parametrize("pack", DISTINCT)
@settings(max_examples=examples(3))
@given(st.integers(0, 10**6), st.sampled_from(RUNS), st.sampled_from([1, 10, 7, 10**6]))
def test_the_fast_path_sees_what_every_rule_asked_would(
    pack: str, seed: int, run: object, columns_every: int
) -> None:
    """Events and baselines of the steps judged at a glance are those of every rule judged at every step."""
    engine = bind(started(packs()[pack], seed))
    one, other = OptimizerRules(engine), OptimizerRules(engine)
    for snapshot in snapshots_of(engine, run(seed), columns_every):  # type: ignore[operator]
        one.take(snapshot)
        other.state = replace(other.state, active=None)
        other.take(snapshot)
        assert list(map(repr, one.events)) == list(map(repr, other.events))
        assert one.state.to_dict() == other.state.to_dict()


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6), st.integers(0, 250), st.sampled_from(RUNS))
def test_events_are_those_of_the_rule_without_it_from_then_on(seed: int, first: int, run: object) -> None:
    """Of a rule with `for: 1` that was not firing before; the names of its incidents included."""
    rules = [
        rule("spike", Spike(above=4.0, warmup=10), for_=1, scope="param"),
        rule("total", Spike(of="total_norm", above=3.0, warmup=10), for_=1),
        rule("high", Above(threshold=60.0), for_=1),
        rule("low", Below(threshold=0.01, of="rms"), for_=1),
        rule("loss", Above(threshold=2.05, of="loss"), for_=1, keep_firing_for=3),
    ]
    free, late = (
        OptimizerRules(bound(rules, SIZE)),
        OptimizerRules(bound([replace(one, from_step=first) for one in rules], SIZE)),
    )
    before: Verdict | None = None
    for snapshot in snapshots_of(free.engine, run(seed), 10):  # type: ignore[operator]
        verdict = free.take(snapshot)
        late.take(snapshot)
        before = verdict if snapshot.step < first else before
    firing = set() if before is None else set(before.firing)
    expected = [repr(each) for each in free.events if each.step >= first and each.rule not in firing]
    reopened = {each.rule for each in free.events if each.step < first}  # `cooldown` 0: none is joined
    assert [repr(each) for each in late.events if each.rule not in firing] == expected, reopened
    assert not [each for each in late.events if each.step < first]


def test_the_law_is_about_rules_that_begin_in_the_midst() -> None:
    """Some fire only before their first step in these runs, and some at it."""
    seen = set()
    for seed in range(4):
        for begun in (False, True):
            rules = packs()["tight"]
            engine = bind(started(rules, seed) if begun else rules)
            one = OptimizerRules(engine)
            for snapshot in snapshots_of(engine, with_faults_that_stay(seed), 10):
                one.take(snapshot)
            starts = {each.rule.id: each.rule.from_step for each in engine.plan.rules}
            seen |= {(begun, step == starts[name] > 0) for step, kind, name in one.kinds if kind == "firing"}
    assert {(False, False), (True, False), (True, True)} <= seen


def test_one_comparison_is_all_that_a_step_adds() -> None:
    """A state whose rules are all reached is in the last stage, and one without such rules always."""
    run = watched(HIGH)
    assert run.state.stage.unreached
    for step in range(8):
        run.take(make_snapshot(run.engine.sites, step, CALM))
    assert not run.state.stage.unreached
    assert watched(replace(HIGH, from_step=0)).engine.plan.stages == ((0, run.state.stage.end, frozenset()),)
