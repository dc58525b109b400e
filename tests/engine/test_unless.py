"""`unless`: while one rule fires another one judges nothing, learns on, and judges the step on which it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Above, AboveRecentMax, Below, Converged, Spike, Stuck
from gradwatch.engine import BoundEngine
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.rule_set import Action, Rule
from tests.engine.cases import OptimizerRules, bound, everywhere, make_snapshot, rule
from tests.engine.fast_path.test_many_steps import see_the_same
from tests.engine.runs import SIZE
from tests.support.examples import examples

HELD = ("low",)
LOW = rule("low", Below(of="loss", threshold=1e-3))
RISE = rule("rise", Above(of="total_norm", threshold=10.0), unless=HELD)
SPIKE = rule("spike", Spike(of="norm", above=6), scope="param", warmup=20, unless=HELD)


def watched(*rules: Rule) -> OptimizerRules:
    """These rules, bound."""
    return OptimizerRules(bound(list(rules), SIZE))


def test_what_is_held_judges_nothing_and_learns_on() -> None:
    """A spike is no news while the loss is next to nothing; the baseline has moved when it is not any more."""
    run = watched(LOW, RISE, SPIKE)
    for step in range(60):
        run.step(step, [1.0] * SIZE, scalars={"loss": 1.0})
    for step in range(60, 300):
        run.step(step, [50.0] * SIZE, scalars={"loss": 1e-6})
    assert run.kinds == [(60, "firing", "low")]
    run.step(300, [50.0] * SIZE, scalars={"loss": 1.0})
    assert run.kinds[1:] == [(300, "resolved", "low"), (300, "firing", "rise")]


@pytest.mark.parametrize("norms", [[500.0] * SIZE, [900.0] + [1.0] * (SIZE - 1)])
def test_the_step_on_which_the_other_ends_is_judged(norms: list[float]) -> None:
    """A loss that comes back with a jump of gradients is told with it, in its own step."""
    run = watched(LOW, RISE, SPIKE)
    for step in range(200):
        run.step(step, [1.0] * SIZE, scalars={"loss": 1.0 if step < 40 else 1e-6})
    run.step(200, norms, scalars={"loss": 2.0})
    assert {(200, "firing", "rise"), (200, "firing", "spike")} <= set(run.kinds)


def test_what_fires_already_goes_on_firing() -> None:
    """Held it neither clears nor counts; without the other it is over."""
    run = watched(LOW, RISE)
    run.step(0, [50.0] * SIZE, scalars={"loss": 1.0})
    for step in range(1, 9):
        run.step(step, [1.0] * SIZE, scalars={"loss": 1e-6})
    assert run.kinds == [(0, "firing", "rise"), (1, "firing", "low")]
    run.step(9, [1.0] * SIZE, scalars={"loss": 1.0})
    assert run.kinds[2:] == [(9, "resolved", "low"), (9, "resolved", "rise")]


def test_a_rule_that_acts_judges_every_step() -> None:
    """It is never held."""
    acting = rule("rise", Above(of="total_norm", threshold=10.0), unless=HELD, do=(Action("skip_step", {}),))
    run = watched(LOW, acting)
    run.step(0, [1.0] * SIZE, scalars={"loss": 1e-6})
    run.step(1, [50.0] * SIZE, scalars={"loss": 1e-6})
    assert (1, "firing", "rise") in run.kinds


def test_one_that_judges_nothing_here_holds_nothing() -> None:
    """Switched off, or of parameters that are not there."""
    off = rule("low", Below(of="loss", threshold=1e-3), enabled=False)
    run = watched(off, RISE)
    run.step(0, [50.0] * SIZE, scalars={"loss": 1e-6})
    assert run.kinds == [(0, "firing", "rise")]


RULES = [
    rule("converged", Converged(above=30.0, clear_below=10.0, half_life=3, warmup=5)),
    rule("odd", Above(of="loss", threshold=3.0), for_=2),
    rule("rise", Above(of="total_norm", threshold=9.0), unless=("converged",)),
    rule("spike", Spike(above=4, warmup=20), scope="param", unless=("converged", "odd")),
    rule("same-bank", Spike(above=8, warmup=20), scope="param"),
    rule("peak", AboveRecentMax(of="norm", above=1.5, window=30, warmup=20), scope="param", unless=("odd",)),
    rule("stuck", Stuck(below=1e-3), scope="param", every=10, unless=("converged",)),
    rule("turns", Spike(of="update_ratio", above=4, warmup=5), scope="param", every=4, unless=("converged",)),
]


def run_of(engine: BoundEngine, seed: int, steps: int = 240) -> list[Snapshot]:
    """A loss that goes down and comes back now and then, some of it not observed, and norms with a few jumps."""
    rng, found, level = np.random.default_rng(seed), [], 0.0
    for step in range(steps):
        level = float(rng.choice([-7.0, 0.0, 1.5])) if rng.random() < 0.03 else level
        norms = np.exp(rng.normal(0, 0.1, SIZE) + (2.0 if rng.random() < 0.05 else 0.0))
        known: dict[str, Any] = {}
        if rng.random() < 0.9:
            known["scalars"] = {"loss": float(np.exp(level + rng.normal(0, 0.1)))}
        if rng.random() < 0.3:
            known["columns"] = {"update_ratio": everywhere(rng.choice([1e-4, 1e-2], SIZE))}
        found.append(make_snapshot(engine.sites, step, norms.tolist(), **known))
    return found


@settings(max_examples=examples(12))
@given(st.integers(0, 10**6))
def test_a_block_sees_what_single_steps_see(seed: int) -> None:
    """Where rules are held, and let go, in the midst of blocks too."""
    engine = bound(RULES, SIZE)
    see_the_same(engine, run_of(engine, seed), seed)


@settings(max_examples=examples(12))
@given(st.integers(0, 10**6))
def test_a_glance_learns_what_every_rule_asked_would(seed: int) -> None:
    """Of a held rule whose series are judged in turns too."""
    engine = bound(RULES, SIZE)
    one, other = OptimizerRules(engine), OptimizerRules(engine)
    for snapshot in run_of(engine, seed):
        one.take(snapshot)
        other.state = replace(other.state, active=None)
        other.take(snapshot)
        assert one.state.to_dict() == other.state.to_dict()
    assert one.kinds == other.kinds


def test_the_law_is_about_runs_in_which_rules_are_held() -> None:
    """Something settles and ends in them, and what is held would have fired."""
    engine, free = (bound(rules, SIZE) for rules in (RULES, [replace(one, unless=()) for one in RULES]))
    told, held = set[tuple[str, str]](), set[str]()
    for seed in range(4):
        one, other = OptimizerRules(engine), OptimizerRules(free)
        for snapshot in run_of(engine, seed):
            one.take(snapshot)
            other.take(snapshot)
        held |= {name for _, kind, name in set(other.kinds) - set(one.kinds) if kind == "firing"}
        told |= {(kind, name) for _, kind, name in one.kinds}
    assert ("resolved", "converged") in told
    assert {"rise", "spike", "peak"} <= held
