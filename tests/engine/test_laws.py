"""Laws of the engine: order never matters, the same gives the same (P27), resume is seamless (P28).

And differentially: the vectorised engine against one rule, one site, one sample at a time in plain Python.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from functools import reduce
from itertools import permutations
from operator import or_
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.detectors import Above, AllZero, Below, Drift, NonFinite, Spike, Stale
from gradwatch.engine import Engine, EngineState
from gradwatch.engine.firing import IDLE, at_rest, move
from gradwatch.records.decision import Decision, Order
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.rule_set import Action, Rule, RuleSet
from tests.detectors import reference
from tests.engine.cases import (
    GROUPS,
    SKIP,
    OptimizerRules,
    bound,
    default_like,
    everywhere,
    make_sites,
    make_snapshot,
    rule,
)
from tests.support.examples import examples

SIZE = 6
STEPS = 70
NEEDS_MORE = {"norm-overflow", "never", "drift"}
"""Rules that a short trace of single faults cannot trip; others of their kind stand in for them."""


def rules() -> tuple[Rule, ...]:
    """The default-like pack made quick to anger, with a second skip and a stop."""
    hasty: dict[str, dict[str, Any]] = {
        "exploded": {"do": (Action("skip_step", {"max_consecutive": 2, "then": "stop"}),), "for_": 2},
        "stale": {"for_": 2, "keep_firing_for": 2},
        "vanishing-by-share": {"for_": 3},
        "dead": {"for_": 2},
    }
    return default_like(**hasty)


def trace(seed: int, steps: int = STEPS, size: int = SIZE) -> list[dict[str, Any]]:
    """The arguments of `make_snapshot` for a run with every kind of fault."""
    rng = np.random.default_rng(seed)
    level, out = np.exp(rng.normal(0, 1, size)), []
    for step in range(steps):
        norms: list[float | None] = (level * np.exp(rng.normal(0, 0.2, size))).tolist()
        for place in range(size):
            if rng.random() < 0.04:
                norms[place] = [None, math.nan, math.inf, 0.0, 1e6, 1e-12][int(rng.integers(6))]
        known: dict[str, Any] = {"scalars": {"lr": 1e-3 if step < 40 else 1e-2}}
        if rng.random() < 0.7:
            known["scalars"]["loss"] = float(
                rng.choice([2.0, 2.1, 1.9, 80.0, math.nan], p=[0.3, 0.3, 0.3, 0.05, 0.05])
            )
        if step % 3 == 0:
            known["columns"] = {
                "zero_fraction": everywhere(rng.choice([0.1, 0.95], size)),
                "update_ratio": everywhere(rng.choice([1e-3, 0.5, 1e-12], size)),
                "weight_norm": everywhere(np.ones(size)),
            }
        if rng.random() < 0.05:
            known["provisional"] = True
        out.append({"step": step, "norms": norms, **known})
    return out


def told(bound_rules: OptimizerRules, steps: list[dict[str, Any]]) -> list[Any]:
    """Everything a run of these steps says: events, masks, decisions."""
    out = []
    for step in steps:
        verdict = bound_rules.step(
            step["step"], step["norms"], **{k: v for k, v in step.items() if k not in ("step", "norms")}
        )
        masks = [
            {name: mask.tolist() for name, mask in part.items()}
            for part in (verdict.firing, verdict.breaching)
        ]
        orders = sorted((order.rule, order.action, order.shadow) for order in bound_rules.decision.orders)
        out.append(
            (
                repr(verdict.events),
                masks,
                sorted(verdict.acting),
                orders,
                bound_rules.decision.skip,
                bound_rules.decision.stop,
            )
        )
    return out


def engine(order: tuple[Rule, ...] | None = None, size: int = SIZE) -> Any:
    """The rules bound to an ordinary model."""
    return Engine(RuleSet(groups=GROUPS, rules=rules() if order is None else order)).bind(make_sites(size))


def test_the_trace_exercises_every_rule() -> None:
    """The laws below would be empty if nothing happened."""
    events, said = [], []
    for seed in range(8):
        bound_rules = OptimizerRules(engine())
        said += told(bound_rules, trace(seed))
        events += bound_rules.events
    silent = {one.id for one in rules()} - {event.rule for event in events}
    assert silent == NEEDS_MORE
    assert {event.kind for event in events} == {"pending", "firing", "resolved", "repeat"}
    assert any(skip for *_, skip, _ in said)
    assert any(stop for *_, stop in said)


@settings(max_examples=examples(5))
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_order_of_rules_in_the_file_never_matters(seed: int, random: Any) -> None:
    """Same events, same masks, same decisions."""
    shuffled = list(rules())
    random.shuffle(shuffled)
    steps = trace(seed)
    assert told(OptimizerRules(engine(tuple(shuffled))), steps) == told(OptimizerRules(engine()), steps)


@settings(max_examples=examples(7))
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_permuting_sites_permutes_the_verdict(seed: int, random: Any) -> None:
    """Rules per parameter do not care where a parameter stands; scalars, not at all."""
    kinds = (
        rule("nan", NonFinite(), do=SKIP),
        rule("s", Spike()),
        rule("b", Below(threshold=0.1)),
        rule("z", AllZero(min_ndim=0)),
    )
    order = list(range(SIZE))
    random.shuffle(order)
    plain = make_sites(SIZE)
    moved = type(plain)(
        tuple(plain.names[i] for i in order),
        tuple(plain.kinds[i] for i in order),
        plain.numels[order],
        plain.ndims[order],
        plain.depths[order],
    )
    ruleset = RuleSet(rules=kinds)
    left, right = OptimizerRules(Engine(ruleset).bind(plain)), OptimizerRules(Engine(ruleset).bind(moved))
    for step in trace(seed):
        one = left.step(step["step"], step["norms"])
        two = right.step(step["step"], [step["norms"][i] for i in order])
        assert {name: mask[order].tolist() for name, mask in one.breaching.items()} == {
            name: mask.tolist() for name, mask in two.breaching.items()
        }
        assert repr(one.events) == repr(two.events)
        assert left.decision == right.decision


@settings(max_examples=examples(7))
@given(st.integers(0, 10**6), st.lists(st.integers(0, STEPS), min_size=1, max_size=4))
def test_resume_is_as_if_nothing_had_happened(seed: int, cuts: list[int]) -> None:
    """P28: cut anywhere, as often as one likes, through JSON; no event twice, none lost."""
    steps = trace(seed)
    expected = told(OptimizerRules(engine()), steps)
    bound_rules, found, start = OptimizerRules(engine()), [], 0
    for cut in [*sorted(cuts), STEPS]:
        found += told(bound_rules, steps[start:cut])
        saved = json.loads(json.dumps(bound_rules.state.to_dict(), allow_nan=False))
        fresh = engine()
        bound_rules, start = OptimizerRules(fresh, EngineState.from_dict(saved, fresh)), cut
    assert found == expected


def test_evaluate_is_pure() -> None:
    """The same state and snapshot give the same verdict, and the state given is left as it was."""
    one = engine()
    state, steps = one.init(), trace(3)
    for step in steps:
        known = {key: value for key, value in step.items() if key not in ("step", "norms")}
        snapshot: Snapshot = make_snapshot(one.sites, step["step"], step["norms"], **known)
        before = json.dumps(state.to_dict())
        first, after = one.evaluate(state, snapshot)
        second, again = one.evaluate(state, snapshot)
        assert json.dumps(state.to_dict()) == before
        assert repr(first.events) == repr(second.events)
        assert after.to_dict() == again.to_dict()
        state = after


def fingerprint() -> str:
    """One hash over everything three faulty runs said, and over the states they ended in."""
    digest = hashlib.sha256()
    for seed in range(3):
        bound_rules = OptimizerRules(engine())
        digest.update(repr(told(bound_rules, trace(seed))).encode())
        digest.update(json.dumps(bound_rules.state.to_dict()).encode())
    return digest.hexdigest()


def test_the_same_gradients_give_the_same_incidents_everywhere() -> None:
    """P27: whatever the hash seed, the time zone and the locale."""
    expected = fingerprint()
    command = [sys.executable, "-c", "from tests.engine.test_laws import fingerprint; print(fingerprint())"]
    for surroundings in (
        {"PYTHONHASHSEED": "1", "TZ": "Pacific/Apia", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "77", "TZ": "UTC", "LC_ALL": "C.UTF-8"},
    ):
        done = subprocess.run(
            command, env={**os.environ, **surroundings}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected, surroundings


orders = st.builds(Order, st.sampled_from("ab"), st.sampled_from(["skip_step", "stop"]), st.booleans())
decisions = st.builds(
    Decision,
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.floats(0, 10)),
    st.frozensets(orders, max_size=3),
    st.one_of(st.none(), st.lists(st.floats(0, 2, width=32), min_size=3, max_size=3).map(np.float32)),
    st.one_of(st.none(), st.lists(st.booleans(), min_size=3, max_size=3).map(np.array)),
)


@given(decisions, decisions, decisions)
def test_decisions_join_as_a_semilattice(a: Decision, b: Decision, c: Decision) -> None:
    """Associative, commutative, idempotent, with the empty decision as identity."""
    assert a | b == b | a
    assert (a | b) | c == a | (b | c)
    assert a | a == a
    assert a | Decision() == a
    assert all(reduce(or_, order) == a | b | c for order in permutations([a, b, c]))


@settings(max_examples=examples(100))
@given(
    st.lists(st.lists(st.sampled_from("bqm-"), min_size=3, max_size=3), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_temporal_logic_is_its_definition(samples: list[list[str]], for_: int, keep: int) -> None:
    """b breach, q quiet, m in between, - missing; each series against the plain state machine."""
    slow, track = [reference.Temporal(for_, keep) for _ in range(3)], IDLE
    for step, row in enumerate(samples):
        marks = np.array(row)
        expected = [
            one(step, mark == "b", mark == "q", mark != "-") for one, mark in zip(slow, row, strict=True)
        ]
        track = move(track, marks == "b", marks == "q", marks != "-", step, for_, keep).track
        found = [
            "firing" if f else "pending" if s else "" for f, s in zip(track.firing, track.streak, strict=True)
        ]
        assert found == expected
        if not any(found):
            track = at_rest(track)


def slow_breaches(steps: list[dict[str, Any]], kind: str) -> list[list[bool]]:
    """Which site breaches at which step, by the reference detectors."""
    sites = [
        {
            "spike": reference.Spike(20, 5),
            "drift": reference.Drift(3.0, 3, 9, 5, 5),
            "stale": reference.Stale(),
        }.get(kind)
        for _ in range(SIZE)
    ]
    out = []
    for step in steps:
        row = [None if norm is None else float(np.float32(norm)) for norm in step["norms"]]
        if kind == "stale":
            scores = [site(int(norm is not None)) for site, norm in zip(sites, row, strict=True)]
        elif kind == "all_zero":
            scores = reference.all_zero(row)
        elif kind == "above":
            scores = [math.nan if v is None else math.inf if math.isnan(v) else v for v in row]
        else:
            scores = [site(norm) for site, norm in zip(sites, row, strict=True)]
        threshold = {"spike": 4.0, "drift": 3.0, "above": 5.0}.get(kind, 0.0)
        out.append([score > threshold for score in scores])
    return out


@settings(max_examples=examples(10))
@given(st.integers(0, 10**6), st.sampled_from([1, 2]), st.sampled_from([0, 2]))
def test_the_engine_agrees_with_one_site_at_a_time(seed: int, for_: int, keep: int) -> None:
    """Breaches and firing of five kinds, through faults and holes, rule by rule and site by site."""
    detectors = {
        "spike": Spike(above=4.0, clear_below=4.0, half_life=20, warmup=5),
        "drift": Drift(of="norm", above=3.0, fast=3, window=9, lag=5, warmup=5),
        "above": Above(threshold=5.0),
        "all_zero": AllZero(min_ndim=0),
        "stale": Stale(),
    }
    bound_rules = OptimizerRules(
        bound([rule(name, one, for_=for_, keep_firing_for=keep) for name, one in detectors.items()], SIZE)
    )
    steps = trace(seed)
    expected = {name: slow_breaches(steps, name) for name in detectors}
    slow = {name: [reference.Temporal(for_, keep) for _ in range(SIZE)] for name in detectors}
    for number, step in enumerate(steps):
        verdict = bound_rules.step(number, step["norms"])
        for name in detectors:
            breach = expected[name][number]
            found = verdict.breaching.get(name, np.zeros(SIZE, bool)).tolist()
            assert found == breach, (name, number)
            judged = judgeable(name, step["norms"], number, expected)
            state = [
                one(number, bad, not bad, known)
                for one, bad, known in zip(slow[name], breach, judged, strict=True)
            ]
            firing = verdict.firing.get(name, np.zeros(SIZE, bool)).tolist()
            assert firing == [where == "firing" for where in state], (name, number)


def judgeable(
    name: str, norms: list[float | None], number: int, expected: dict[str, list[list[bool]]]
) -> list[bool]:
    """Whether a site that does not breach was judged at all; in a warm-up nothing has fired yet."""
    if name == "stale":
        return [True] * SIZE
    if name in ("above", "all_zero"):
        return [norm is not None for norm in norms]
    return [norm is not None and math.isfinite(norm) and norm > 0 for norm in norms]
