"""The step on which no idle rule trips, at a glance, against the whole judgement: the same verdicts and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import DETECTORS, Sample, breaches
from gradwatch.engine import EngineState
from gradwatch.records.snapshot import Snapshot
from tests.engine.cases import OptimizerRules, everywhere, make_snapshot
from tests.engine.runs import COSTLY, DISTINCT, SIZE, bind, mostly_healthy, packs, with_faults_that_stay
from tests.support.examples import examples


def restless(state: EngineState) -> EngineState:
    """The same state, of which nothing is known: `evaluate` then judges rule by rule."""
    return replace(state, ordinary=None, done=(), active=None)


@pytest.mark.parametrize("pack", DISTINCT)
@settings(max_examples=examples(3))
@given(st.integers(0, 10**6), st.sampled_from([mostly_healthy, with_faults_that_stay]))
def test_a_glance_sees_what_judging_sees(pack: str, seed: int, run: Callable[[int], list[Any]]) -> None:
    """Same verdict, same decision, bit-equal state, at every step."""
    engine = bind(packs()[pack])
    state = engine.init()
    for step in run(seed):
        known = {key: value for key, value in step.items() if key not in ("step", "norms")}
        snapshot: Snapshot = make_snapshot(engine.sites, step["step"], step["norms"], **known)
        quick, after = engine.evaluate(state, snapshot)
        slow, expected = engine.evaluate(restless(state), snapshot)
        assert repr(quick.events) == repr(slow.events)
        for one, two in ((quick.firing, slow.firing), (quick.breaching, slow.breaching)):
            assert {k: v.tolist() for k, v in one.items()} == {k: v.tolist() for k, v in two.items()}
        assert quick.acting == slow.acting
        assert after.to_dict() == expected.to_dict()
        assert (after.ordinary is None, after.done) == (expected.ordinary is None, expected.done)
        assert after.active == expected.active
        assert {k: v.tolist() for k, v in after.overdue.items()} == {
            k: v.tolist() for k, v in expected.overdue.items()
        }
        state = after


@pytest.mark.parametrize("pack", packs())
def test_healthy_steps_are_quiet(pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady gradients never get as far as the judgement of single rules, whatever the pack."""
    engine, rng = bind(packs()[pack]), np.random.default_rng(1)
    bound_rules, judged = OptimizerRules(engine), []
    whole = engine._rule_by_rule
    monkeypatch.setattr(engine, "_rule_by_rule", lambda *args: judged.append(args[1].step) or whole(*args))
    for step in range(60):
        bound_rules.step(
            step, (2 + rng.uniform(-0.01, 0.01, SIZE)).tolist(), scalars={"lr": 1e-3, "loss": 2.0}
        )
    due = set(range(0, 60, {"odd": 3, "beside": 5, "conditions": 3, "acting": 3}.get(pack, 60)))
    if pack in (
        "conditions",
        "acting",
        "windows",
    ):  # where the warm-up of a rule ends that one of them is about
        due |= set(range(21))
    assert set(judged) <= due, "more than the first step was judged"


def test_rules_that_fire_are_judged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that fires for hundreds of steps is asked on each of them, and no other rule is, also after."""
    engine, rng = bind(packs()["default"]), np.random.default_rng(1)
    bound_rules, judged = OptimizerRules(engine), []
    whole = engine._rule_by_rule
    monkeypatch.setattr(engine, "_rule_by_rule", lambda *args: judged.append(args[1].step) or whole(*args))
    for step in range(400):
        norms = (2 + rng.uniform(-0.01, 0.01, SIZE)).tolist()
        norms[0] = norms[0] * (1e-9 if 100 <= step < 300 else 1.0)
        bound_rules.step(step, norms, scalars={"lr": 1e-3, "loss": 2.0})
    kinds = [(event.rule, event.kind) for event in bound_rules.events]
    assert ("vanishing", "firing") in kinds
    assert ("vanishing", "resolved") in kinds
    assert len(judged) < 20, judged


@pytest.mark.parametrize("odd", [0.0, None])
def test_parameters_without_a_gradient_are_seen_at_a_glance(
    odd: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter whose gradient is zero, or does not come, for good costs no judgement of every rule at each step."""
    engine, rng = bind(packs()["default"]), np.random.default_rng(1)
    bound_rules, judged = OptimizerRules(engine), []
    whole = engine._rule_by_rule
    monkeypatch.setattr(engine, "_rule_by_rule", lambda *args: judged.append(args[1].step) or whole(*args))
    for step in range(300):
        norms: list[float | None] = (2 + rng.uniform(-0.01, 0.01, SIZE)).tolist()
        norms[3] = odd
        bound_rules.step(step, norms, scalars={"lr": 1e-3, "loss": 2.0})
    assert len(judged) < 30, judged


def test_healthy_columns_of_some_sites_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that are judged on some sites at each step end at a bound too; one that is pending is judged."""
    engine = bind(tuple(one for one in packs()["staggered"] if one.id != "weights"))
    bound_rules, judged = OptimizerRules(engine), []
    whole = engine._rule_by_rule
    monkeypatch.setattr(engine, "_rule_by_rule", lambda *args: judged.append(args[1].step) or whole(*args))
    for step in range(30):
        columns = {name: everywhere(np.full(SIZE, usual)) for name, (usual, _) in COSTLY.items()}
        if step == 20:
            columns["update_ratio"] = everywhere(np.full(SIZE, 0.5))
        bound_rules.step(step, [2.0] * SIZE, columns=columns)
    assert judged[:2] == [0, 20]
    assert [event.step for event in bound_rules.events if event.kind == "firing"] == [20]


@pytest.mark.parametrize("kind", sorted(DETECTORS))
def test_safe_values_do_not_breach(kind: str) -> None:
    """`safe` promises what `score` keeps: its ends do not breach."""
    cls = DETECTORS[kind]
    detector = cls(threshold=2.0) if kind in ("above", "below") else cls()
    safe = detector.safe
    if safe is None:
        return
    ends = [end for end in safe if np.isfinite(end)]
    values = np.array(ends, np.float32 if kind == "all_zero" else np.float64)
    aux = {name: np.ones(len(values)) for name in detector.columns[1:]}
    sample = Sample(values, np.ones(len(values), np.bool_), aux)
    assert not breaches(detector, detector.score((), sample)).any()
    assert detector.cannot_breach(*safe)
