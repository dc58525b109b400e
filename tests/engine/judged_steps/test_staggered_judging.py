"""Turns of staggered series: everything is judged at its turn, or at the first step with a value after it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.detectors import Above
from gradwatch.engine import Engine
from gradwatch.engine.judged_steps import staggered_reads
from gradwatch.records.snapshot import Column
from gradwatch.rules.rule_set import RuleSet
from tests.engine.cases import make_sites, make_snapshot, rule

SIZE, EVERY = 6, 4
COLUMNS = ("max_abs", "update_norm")


@pytest.fixture(autouse=True)
def phases_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model whose parameters have phases as those of a large one have."""
    monkeypatch.setattr(staggered_reads, "SMALLEST_PART", 1)


@pytest.mark.usefixtures("phases_of_their_own")
@given(
    st.integers(0, 9),
    st.lists(
        st.tuples(
            st.sets(st.integers(0, SIZE - 1)), st.sampled_from(["", "", "", "provisional", "rejected"])
        ),
        max_size=30,
    ),
)
def test_what_was_in_turn_is_judged_at_the_first_step_that_has_a_value(
    start: int, steps: list[tuple[set[int], str]]
) -> None:
    """Against a model in sets: in turn now, or in turn before and not judged since; each rule breaches if judged."""
    rules = tuple(
        rule(f"{column}-{every}", Above(of=column, threshold=0.0), every=every, for_=1)
        for column in COLUMNS
        for every in (EVERY, 7)
    )
    engine = Engine(RuleSet(rules=rules)).bind(make_sites(SIZE))
    state, owed = engine.init(), {one.id: set[int]() for one in rules}
    for step, (there, fate) in enumerate(steps, start):
        present = np.isin(np.arange(SIZE), list(there))
        columns = {name: Column(np.ones(SIZE, np.float32), present) for name in COLUMNS}
        scalars = {"scaler_skip": 1.0} if fate == "rejected" else {}
        snapshot = make_snapshot(
            engine.sites,
            step,
            [1.0] * SIZE,
            columns=columns,
            scalars=scalars,
            provisional=fate == "provisional",
        )
        verdict, state = engine.evaluate(state, snapshot)
        for one in engine.plan.rules:
            assert one.series.phases is not None
            known = owed[one.rule.id]
            if step or one.series.column != "update_norm":  # the first step has no update
                known |= set(np.flatnonzero(one.series.phases == step % one.rule.every).tolist())
            judged = set() if fate else known & there
            breaching = verdict.breaching.get(one.rule.id, np.zeros(SIZE, np.bool_))
            assert set(np.flatnonzero(breaching).tolist()) == judged
            known -= judged
            overdue = state.overdue.get(one.series.key, np.zeros(SIZE, np.bool_))
            assert set(np.flatnonzero(overdue).tolist()) == known


def test_what_stays_overdue_stays_the_same_object() -> None:
    """A parameter that never gets a gradient costs no new arrays at each step: what is made of it is kept."""
    engine = Engine(RuleSet(rules=(rule("r", Above(of="max_abs", threshold=0.0), every=EVERY, for_=1),)))
    bound = engine.bind(make_sites(SIZE))
    state, found = bound.init(), []
    present = np.arange(SIZE) != 2
    for step in range(3 * EVERY):
        columns = {"max_abs": Column(np.ones(SIZE, np.float32), present)}
        _, state = bound.evaluate(state, make_snapshot(bound.sites, step, [1.0] * SIZE, columns=columns))
        found.append(state.overdue)
    late = [one for one in found if one]
    assert len(late) >= 2 * EVERY
    assert all(one is late[0] for one in late)
    (mask,) = late[0].values()
    assert np.flatnonzero(mask).tolist() == [2]


def test_nothing_is_in_turn_without_staggered_rules() -> None:
    """A rule that is judged at each step has no turns, and is judged on all its parameters."""
    engine = Engine(RuleSet(rules=(rule("all", Above(of="max_abs", threshold=0.0), for_=1),))).bind(
        make_sites(SIZE)
    )
    columns = {"max_abs": Column(np.ones(SIZE, np.float32), np.ones(SIZE, np.bool_))}
    verdict, state = engine.evaluate(
        engine.init(), make_snapshot(engine.sites, 0, [1.0] * SIZE, columns=columns)
    )
    assert not state.in_turn
    assert not state.overdue
    assert verdict.breaching["all"].all()
