"""A jump of the total norm needs no warm-up; a fact is told once; a healthy step costs nothing for either."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Above, Jump, LossNonFinite, NonFinite, Sample, breaches
from gradwatch.engine import BoundEngine, Engine, EngineState
from gradwatch.errors import RuleFileError
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.engine.cases import SKIP, OptimizerRules, bound, make_sites, rule
from tests.support.examples import examples

Pair = tuple[float | None, float | None]


def jumps(pairs: list[Pair], **keys: float) -> list[int]:
    """The samples (total norm, loss) that breach, by their place."""
    detector, found = Jump(**keys), []
    state: Any = detector.init(1)
    for place, (total, loss) in enumerate(pairs):
        filled = np.array([7.0 if total is None else total])
        beside = {name: np.array([math.nan]) for name in detector.columns[1:]}
        beside["loss"] = np.array([math.nan if loss is None else loss])
        sample = Sample(filled, np.array([total is not None]), beside)
        whole = detector.score(state, sample), detector.learn(state, sample)
        score, state = detector.advance(state, sample)  # in plain floats where nothing can breach
        assert str(state) == str(whole[1])
        assert (score is None and not breaches(detector, whole[0])[0]) or str(score) == str(whole[0])
        if score is not None and breaches(detector, score)[0]:
            found.append(place)
    return found


def test_ten_thousand_times_the_largest_is_enough_and_a_hundred_with_the_loss() -> None:
    """From the third sample on; REINFORCE's healthy 1,100 is none, and a loss that jumps alone is none."""
    assert jumps([(1.0, 1.0), (1e30, 1.0)]) == []
    assert jumps([(1.0, 1.0), (2.0, 1.0), (2e4, 1.0)]) == [2]
    assert jumps([(1.0, 1.0), (2.0, 1.0), (2200.0, 1.0), (1.0, 1.0)]) == []
    assert jumps([(1.0, 1.0), (2.0, -1.5), (2200.0, -150.0)]) == [2]
    assert jumps([(1.0, 1.0), (2.0, 1.5), (2200.0, math.inf)]) == [2]
    assert jumps([(1.0, 1.0), (2.0, 1.5), (190.0, math.inf)]) == []
    assert jumps([(1.0, None), (2.0, None), (2200.0, 1e9), (3.0, None)]) == []
    assert jumps([(1.0, 1.0), (1.0, 1.0), (1.0, 1e9)]) == []


def test_one_broken_step_blinds_nothing_that_follows() -> None:
    """A breach raises what is known by a hundred times at most: the next fault is seen, and a new level is accepted."""
    calm: list[Pair] = [(1.0, 1.0)] * 3
    assert jumps([*calm, (1e38, 1.0), *calm, (1e7, 1.0)]) == [3, 7]
    assert jumps([*calm, *[(1e8, 1.0)] * 6]) == [3, 4, 5]


totals = st.one_of(st.none(), st.floats(1e-6, 1e12), st.sampled_from([0.0, math.nan, math.inf, 1e300]))
losses = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, 0.0]))


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(totals, losses), max_size=40))
def test_jump_is_its_formula(pairs: list[Pair]) -> None:
    """Against a plain restatement."""
    expected, count, largest, most = [], 0, 0.0, 0.0
    for place, (total, loss) in enumerate(pairs):
        if total is None or not math.isfinite(total) or total <= 0:
            continue
        size = math.nan if loss is None else abs(loss)
        agrees = most > 0 and size >= 100 * most
        breach = count >= 2 and (total / largest >= 1e4 or (total / largest >= 100 and agrees))
        if breach:
            expected.append(place)
            total, size = min(total, 100 * largest), min(size, 100 * most)
        count, largest = count + 1, max(largest, total)
        most = max(most, size) if math.isfinite(size) else most
    assert jumps(pairs) == expected


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10**6))
def test_the_glance_says_what_the_whole_judgement_says(seed: int) -> None:
    """Steps that the fast path leaves out changed nothing; a state through JSON goes on alike."""
    rng = np.random.default_rng(seed)
    engine = bound([rule("jump", Jump(), severity="critical")])
    fast, plain = OptimizerRules(engine), OptimizerRules(engine)
    for step in range(40):
        norms = (np.exp(rng.normal(0, 1, 4)) * rng.choice([1.0, 1e3, 1e6], p=[0.9, 0.05, 0.05])).tolist()
        scalars = {} if rng.random() < 0.2 else {"loss": float(rng.choice([1.0, -1.1, 5e2, math.nan]))}
        if rng.random() < 0.1:
            scalars |= {"confirmed_jump": 300.0, "confirmed_norm": 900.0}
        fast.step(step, norms, scalars=scalars)
        saved = json.loads(json.dumps(plain.state.to_dict(), allow_nan=False))
        plain.state = EngineState.from_dict(saved, engine)  # of which nothing is known: judged rule by rule
        plain.step(step, norms, scalars=scalars)
        assert fast.state.to_dict() == plain.state.to_dict()
    assert fast.kinds == plain.kinds


def test_the_default_pack_tells_a_ruin_in_its_warm_up() -> None:
    """Twelve steps of an RNN, then a norm of 1e38: critical at that step, with value, factor and bound."""
    bound_rules = OptimizerRules(_default())
    for step in range(12):
        bound_rules.step(step, [20.0 + step, 5.0, 1.0, 1.0], scalars={"loss": 200.0})
    bound_rules.step(12, [1e38, 1e30, 1.0, 1.0], scalars={"loss": 5e36})
    (event,) = [
        event for event in bound_rules.events if event.severity == "critical" and event.kind == "firing"
    ]
    assert (event.step, event.rule) == (12, "jump")
    assert event.score > 1e30
    assert event.threshold == 100
    assert ", 3" in event.description


def _default() -> BoundEngine:
    """The default pack on four parameters."""
    return Engine(load_rules("default")).bind(make_sites(4))


def test_one_nan_is_one_critical_incident() -> None:
    """Gradients, loss and total are not finite for nine steps: the gradients' own rule tells it, once, and no bound."""
    bound_rules = OptimizerRules(_default())
    for step in range(40):
        broken = 25 <= step < 34
        norms = [math.nan if broken else 1.0, 1.0, 1.0, 1.0]
        bound_rules.step(step, norms, scalars={"loss": math.nan if broken else 1.0})
    critical = [
        event for event in bound_rules.events if event.severity == "critical" and event.kind == "firing"
    ]
    assert [(event.step, event.rule) for event in critical] == [(25, "non-finite")]
    assert not [event for event in bound_rules.events if "nan" in event.description]


def test_a_nan_is_told_by_whoever_is_there_to_tell_it() -> None:
    """Without a rule on finiteness a bound tells it, a rule that acts acts, and a loss alone is its own incident."""
    alone = OptimizerRules(bound([rule("rail", Above(threshold=10, of="total_norm"), scope="total")]))
    alone.step(0, [math.nan, 1.0, 1.0, 1.0])
    assert alone.kinds == [(0, "firing", "rail")]
    rules = [
        rule("fact", NonFinite()),
        rule("rail", Above(threshold=10, of="total_norm"), scope="total", do=SKIP),
        rule("bound", Above(threshold=10), scope="param"),
        rule("a-loss", LossNonFinite()),
    ]
    both = OptimizerRules(bound(rules))
    both.step(0, [math.nan, 11.0, 1.0, 1.0], scalars={"loss": math.inf})
    assert both.decision.skip
    assert {(name, event.count) for event in both.events for name in [event.rule]} == {
        ("fact", 1),
        ("rail", 0),
        ("bound", 1),  # of the finite norm that is too large
    }
    both.step(1, [1.0, 1.0, 1.0, 1.0], scalars={"loss": math.inf})
    assert (1, "firing", "a-loss") in both.kinds


def test_a_rule_file_may_say_so() -> None:
    """Both factors are keys of `detect:`; a confirmed factor above the other one makes no sense."""
    text = "rules: {{r: {{detect: {{kind: jump, above: {above}, confirmed: {confirmed}}}}}}}"
    made: RuleSet = parse_rules("version: 1\n" + text.format(above=500, confirmed=50))
    assert made.rules[0].detect == Jump(above=500, confirmed=50)
    with pytest.raises(RuleFileError, match="confirmed"):
        parse_rules("version: 1\n" + text.format(above=50, confirmed=500))
