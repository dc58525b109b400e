"""Many calm steps judged in one call against one after the other: the same events and bit-equal states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.capture.snapshot_assembly import appended
from gradwatch.detectors import Dead
from gradwatch.engine import BoundEngine, Engine, EngineState
from gradwatch.errors import GradwatchError
from gradwatch.records.snapshot import Column, Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.rules.files import load_rules
from tests.engine.cases import bound, everywhere, make_sites, make_snapshot, rule
from tests.engine.runs import (
    DISTINCT,
    SIZE,
    STEPS,
    bind,
    mostly_healthy,
    packs,
    with_costly_columns_that_stay,
    with_faults_that_stay,
)
from tests.support.examples import examples

MOST = 32


def calm(snapshot: Snapshot) -> bool:
    """True if it may be one of a block."""
    return not snapshot.provisional and bool((snapshot.calls[:SIZE] > 0).all())


def judged_together(
    engine: BoundEngine, state: EngineState, snapshots: list[Snapshot], anew: Sequence[int] = ()
) -> tuple[list[Verdict], EngineState]:
    """Judge the first of these: as many as are calm together, else one; their verdicts, the state then.

    `anew` are the first of another optimizer.
    """
    count = next((t for t, one in enumerate(snapshots) if not calm(one)), len(snapshots))
    norm = np.array([one.norm[:SIZE] for one in snapshots[:count]]).reshape(count, SIZE)
    found = engine.evaluate_many(state, snapshots[:count], norm, [t for t in anew if t < count])
    if found.in_turn:
        assert len(found.verdicts) == len(found.in_turn)
        assert not any(verdict.events or verdict.acting for verdict in found.verdicts)
        return list(found.verdicts), found.state
    verdict, after = engine.evaluate(
        engine.restarts.for_another_optimizer(state) if 0 in anew else state, snapshots[0]
    )
    return [verdict], after


def told(verdict: Verdict) -> dict[str, Any]:
    """Everything that a verdict says, to be compared."""
    masks = {name: getattr(verdict, name) for name in ("firing", "breaching", "standing")}
    return {
        "events": list(map(repr, verdict.events)),
        "acting": verdict.acting,
        "due": sorted(verdict.due),
        **{name: {rule: mask.tolist() for rule, mask in found.items()} for name, found in masks.items()},
    }


def snapshots_of(engine: BoundEngine, run: list[dict[str, Any]], columns_every: int) -> list[Snapshot]:
    """These steps, with columns at some of them only."""
    found = []
    for step in run:
        known = {key: value for key, value in step.items() if key not in ("step", "norms")}
        if step["step"] % columns_every:
            known.pop("columns", None)
        found.append(make_snapshot(engine.sites, step["step"], step["norms"], **known))
    return found


@pytest.mark.parametrize("pack", DISTINCT)
@settings(max_examples=examples(3))
@given(
    st.integers(0, 10**6),
    st.sampled_from([mostly_healthy, with_faults_that_stay, with_costly_columns_that_stay]),
    st.sampled_from([1, 10, 7, 10**6]),
)
def test_a_block_sees_what_single_steps_see(
    pack: str, seed: int, run: Callable[[int], list[Any]], columns_every: int
) -> None:
    """Cut anywhere, blocks give the events and states of one step after the other."""
    engine = bind(packs()[pack])
    see_the_same(engine, snapshots_of(engine, run(seed), columns_every), seed)


def see_the_same(
    engine: BoundEngine, snapshots: list[Snapshot], seed: int, anew: Collection[int] = ()
) -> None:
    """Blocks of these, cut anywhere, give the verdicts and states of one after the other."""
    rng, singly, states, verdicts = np.random.default_rng(seed), engine.init(), [], []
    for t, snapshot in enumerate(snapshots):
        verdict, singly = engine.evaluate(
            engine.restarts.for_another_optimizer(singly) if t in anew else singly, snapshot
        )
        states.append(singly)
        verdicts.append(told(verdict))
    state, at = engine.init(), 0
    while at < len(snapshots):
        cut = int(rng.integers(1, MOST + 1))
        first = [t - at for t in range(at, at + cut) if t in anew]
        found, state = judged_together(engine, state, snapshots[at : at + cut], first)
        assert verdicts[at : at + len(found)] == list(map(told, found))
        at += len(found)
        expected = states[at - 1]
        assert state.to_dict() == expected.to_dict()
        for name in ("done", "active", "lr"):
            assert getattr(state, name) == getattr(expected, name)
        assert (state.ordinary is None) == (expected.ordinary is None)
        assert state.in_turn.keys() == expected.in_turn.keys()
        assert {k: v.tolist() for k, v in state.overdue.items()} == {
            k: v.tolist() for k, v in expected.overdue.items()
        }


@settings(max_examples=examples(3))
@given(st.integers(0, 10**6))
def test_a_block_of_several_optimizers_sees_what_single_steps_see(seed: int) -> None:
    """What is learned of a rate ends with its optimizer, in the midst of a block too, whatever its schedule is."""
    rng, engine = np.random.default_rng(seed), bind(packs()["default"])
    anew = set(np.flatnonzero(rng.random(STEPS) < rng.choice([0.02, 0.3])).tolist())
    run, rate, factor = mostly_healthy(seed), 1e-3, 1.0
    for step, one in enumerate(run):
        if step in anew:
            rate, factor = rng.choice([1e-3, 2e-3]), rng.choice([1.0, 1.0, 0.9, 2.5])
        rate = min(rate * (factor if rng.random() < 0.95 else 2.9), 1e3)
        one["scalars"]["lr"] = float(rate)
    see_the_same(engine, snapshots_of(engine, run, 10), seed, anew)


def among_ranks(seed: int, faulty: bool) -> tuple[BoundEngine, list[Snapshot]]:
    """The default pack among two ranks, which exchange at every tenth step; one is out of line now and then."""
    sites, default = make_sites(SIZE), load_rules("default")
    sites = appended(replace(sites, numels=sites.numels * 4096), ("rank 0", "rank 1"), "rank")
    rng, found = np.random.default_rng(seed), []
    for step in range(STEPS):
        norms = [*(2 + rng.uniform(-0.01, 0.01, SIZE)), None, None]
        columns = {}
        if step % 10 == 0:
            out = faulty and rng.random() < 0.1
            columns = {
                "norm_local": at(slice(SIZE), 2 + rng.uniform(-0.01, 0.01, SIZE)),
                "rank_norm": at(
                    slice(SIZE, None), [rng.choice([1e4, np.nan]) if out else 1.0, rng.uniform(1, 1.1)]
                ),
                "rank_mismatch": at(slice(SIZE, None), [faulty and rng.random() < 0.05, 0]),
                "rank_site": at(slice(SIZE, None), [1, 2]),
            }
        found.append(make_snapshot(sites, step, norms, columns=columns, scalars={"lr": 1e-3, "loss": 2.0}))
    return Engine(default).bind(sites), found


def at(where: slice, values: Any) -> Column:
    """A column that was measured at these sites, parameters or ranks."""
    column = Column(np.zeros(SIZE + 2, np.float32), np.zeros(SIZE + 2, np.bool_))
    column.values[where], column.present[where] = values, True
    return column


@settings(max_examples=examples(3))
@given(st.integers(0, 10**6))
def test_a_block_among_ranks_sees_what_single_steps_see(seed: int) -> None:
    """Steps with what ranks exchanged are judged in blocks too; one rank out of line is told in its step."""
    see_the_same(*among_ranks(seed, faulty=True), seed)


def test_steady_steps_among_ranks_are_judged_in_blocks() -> None:
    """With the step of an exchange as the last of ten, as they come."""
    engine, snapshots = among_ranks(1, faulty=False)
    state, calls, at = engine.init(), 0, 0
    while at < STEPS:
        exchanged = at + -at % 10  # the next step of an exchange, with which a block ends
        found, state = judged_together(engine, state, snapshots[at : exchanged + 1])
        at, calls = at + len(found), calls + (at >= 100)
    assert calls <= (STEPS - 100) / 10 + 2


@pytest.mark.parametrize("pack", packs())
def test_steady_steps_are_judged_in_blocks(pack: str) -> None:
    """Whatever the pack, steady gradients with jitter are judged many at a time, but where a rule is due every N."""
    engine, rng = bind(packs()[pack]), np.random.default_rng(1)
    level, state, calls = np.exp(rng.normal(0, 0.1, SIZE)), engine.init(), 0
    snapshots = [
        make_snapshot(
            engine.sites,
            step,
            level * (1 + rng.uniform(-0.01, 0.01, SIZE)),
            scalars={"lr": 1e-3, "loss": 2.0 + step % 3 / 100, "observed.reward": 1.0},
        )
        for step in range(300)
    ]
    at = 0
    while at < len(snapshots):
        found, state = judged_together(engine, state, snapshots[at : at + MOST])
        at, calls = at + len(found), calls + (at >= 100)
    third, fifth = 2 * 200 / 3, 2 * 200 / 5  # the steps of `every`, and what is between them
    rare = {"odd": third, "beside": fifth, "conditions": third, "acting": third}.get(pack, 0)
    assert calls <= rare + 200 / 10, calls


def test_a_rule_that_fires_on_is_no_reason_to_judge_one_by_one() -> None:
    """While the same parameter vanishes for hundreds of steps, they are judged many at a time, with that verdict."""
    engine, rng = bind(packs()["default"]), np.random.default_rng(1)
    state, verdicts, at = engine.init(), [], 0
    snapshots = []
    for step in range(400):
        norms = 2 + rng.uniform(-0.01, 0.01, SIZE)
        norms[0] *= 1e-9 if 100 <= step < 300 else 1.0
        snapshots.append(make_snapshot(engine.sites, step, norms, scalars={"lr": 1e-3, "loss": 2.0}))
    while at < len(snapshots):
        found, state = judged_together(engine, state, snapshots[at : at + MOST])
        verdicts.append((at, len(found), sorted(found[0].firing)))
        at += len(found)
    assert sum(done for at, done, firing in verdicts if "vanishing" in firing and done > 1) > 150
    assert len([at for at, _, _ in verdicts if 150 <= at < 290]) < 20


def test_a_rule_on_some_sites_at_each_step_that_fires_on_is_judged_in_blocks() -> None:
    """What a step says of it is of the series that are in turn then, as one after the other."""
    engine = bind((rule("dead", Dead(min_ndim=0), every=3, for_=1),))
    columns = {"zero_fraction": everywhere([0.95, 0.1] * (SIZE // 2))}
    rng = np.random.default_rng(1)
    snapshots = [
        make_snapshot(engine.sites, step, 2 + rng.uniform(-0.01, 0.01, SIZE), columns=columns)
        for step in range(300)
    ]
    state, calls, at, breaching = engine.init(), 0, 0, []
    while at < len(snapshots):
        found, state = judged_together(engine, state, snapshots[at : at + MOST])
        breaching += [sorted(np.flatnonzero(verdict.breaching.get("dead", [])).tolist()) for verdict in found]
        at, calls = at + len(found), calls + (at >= 100)
    assert calls <= 200 / MOST + 1
    assert sorted(site for found in breaching[200:203] for site in found) == [0, 2, 4, 6]  # each in its turn


def test_a_block_refuses_snapshots_of_other_sites() -> None:
    """As `evaluate` does: states and steps of another model are no matter of these rules."""
    engine, other = bound([rule("spike", packs()["tight"][0].detect)], size=4), bound([], size=3)
    snapshot = make_snapshot(other.sites, 0, [1.0] * 3)
    with pytest.raises(GradwatchError, match="other sites"):
        engine.evaluate_many(engine.init(), [snapshot], snapshot.norm[None])
