"""Saved states: their health by the Records, corrected by later looks, and which of very many are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.checkpoint import saved_state_health
from gradwatch.checkpoint.health_tracker import NOT_LOOKED_AT
from gradwatch.checkpoint.saved_state_health import SavedStateTracker
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.saved_optimizer_state import SavedState, TakenState
from tests.support.sink_records import make_record, make_sites

SITES = make_sites(1)
FIT = CheckpointHealth()
ILL = CheckpointHealth(False, 0, ("weights are not finite: a",))


def record(step: int, health: CheckpointHealth | None = FIT, optimizer: int = 0) -> Record:
    made = make_record(SITES, step=step, optimizer=optimizer)
    return replace(made, checkpoint=health)


def taken(number: int, step: int, **others: int) -> TakenState:
    return TakenState(number, ((0, step), *((int(one[1:]), at) for one, at in others.items())), float(step))


def kept_of(states: SavedStateTracker, last: bool = True) -> dict[int, SavedState]:
    return {one.number: one for one in states.take_kept(last)}


def test_the_health_is_that_of_the_record_of_its_step() -> None:
    """A state waits until its step is judged; what later Records say of later steps is none of it."""
    states = SavedStateTracker()
    states.add([record(3)])
    states.take(taken(0, 5))
    assert not states.take_kept()
    states.add([record(4), record(5), record(6, replace(ILL, last_healthy_step=5))])
    states.take(taken(1, 6))
    found = kept_of(states)
    assert [one.healthy for one in found.values()] == [True, False]
    assert found[1].reasons == ILL.reasons
    assert (states.taken, states.healthy) == (2, 1)


def test_a_later_look_confirms_it() -> None:
    """Until then nothing but gradients vouch for it."""
    states = SavedStateTracker()
    states.take(taken(0, 5))
    states.add([record(5, CheckpointHealth(weights_step=2))])
    assert kept_of(states, last=False)[0] == SavedState(
        0, ((0, 5),), 5.0, healthy=True, looked=False, weights_step=2
    )
    states.add([record(6, CheckpointHealth(weights_step=2))])
    assert not states.take_kept()
    states.add([record(7, CheckpointHealth(weights_step=6))])
    assert kept_of(states, last=False)[0].looked


def test_a_later_look_takes_it_back() -> None:
    """Of two that were healthy by their gradients, the one after the last healthy step is not; reasons say why."""
    states = SavedStateTracker()
    states.add([record(3)])
    states.take(taken(0, 3))
    states.add([record(9)])
    states.take(taken(1, 9))
    assert all(one.healthy for one in kept_of(states, last=False).values())
    states.add([record(12, replace(ILL, last_healthy_step=4, weights_step=4))])
    found = kept_of(states)
    assert (found[0].healthy, found[0].looked) == (True, True)
    assert not found[1].healthy
    assert found[1].reasons == ("found later: weights are not finite: a",)
    assert (states.taken, states.healthy) == (2, 1)


def test_the_last_look_of_a_watch_counts() -> None:
    """After the last step there is no Record: the look at the end confirms, or takes back, what was saved then."""
    for health, looked, healthy in (
        (CheckpointHealth(weights_step=7), True, True),
        (replace(ILL, last_healthy_step=2), False, False),
        (None, False, True),
    ):
        states = SavedStateTracker()
        states.add([record(7)])
        states.take(taken(0, 7))
        states.end(health)
        found = kept_of(states)[0]
        assert (found.looked, found.healthy) == (looked, healthy)


def test_a_look_that_was_not_possible_takes_nothing_back() -> None:
    """As after the end of a process group: nothing was found, so a state is as it was."""
    states = SavedStateTracker()
    states.add([record(7)])
    states.take(taken(0, 7))
    states.end(CheckpointHealth(False, None, (f"{NOT_LOOKED_AT} (meta device)",)))
    assert [(one.healthy, one.looked) for one in states.take_kept(last=True)] == [(True, False)]


def test_one_whose_step_is_never_judged_is_not_vouched_for() -> None:
    """Without any Record nothing is known; with the Records of others it is as these are."""
    states = SavedStateTracker()
    states.take(taken(0, 5))
    states.end(FIT)
    assert kept_of(states)[0].reasons == (saved_state_health.NOT_JUDGED,)


def test_a_look_must_have_seen_each_optimizer() -> None:
    """Optimizers count their own steps: a look after the last step of one is before that of the other."""
    states = SavedStateTracker()
    states.take(taken(0, 10, _1=50))
    states.add(
        [record(10, CheckpointHealth(weights_step=10)), record(50, CheckpointHealth(weights_step=48), 1)]
    )
    assert not kept_of(states, last=False)[0].looked
    states.add([record(51, CheckpointHealth(weights_step=50), 1)])
    assert kept_of(states, last=False)[0].looked


def test_memory_is_bounded_where_nothing_is_ever_judged_or_confirmed() -> None:
    """A state at every step, no look in all the time: what waits, what is unsure and what is kept have an end."""
    states = SavedStateTracker()
    count = 6_000
    for step in range(count):
        states.take(taken(step, step))
        if step % 2:
            states.add([record(step)])
        states.take_kept()
    assert len(states._unsure) <= saved_state_health.MOST_UNSURE
    assert len(states._numbers) <= saved_state_health.MOST_UNSURE
    assert states.taken == states.healthy == count


FEW = 8


@settings(max_examples=200, deadline=None)
@given(
    # Steps in a row, whether the weights are healthy after them, and every how many of them a state is saved.
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 5)), min_size=1, max_size=10),
    st.integers(1, 50),
    st.integers(0, 20),
)
def test_what_is_kept_of_many(runs: list[tuple[int, bool, int]], batch: int, changes: int) -> None:
    """All are counted, few are kept: the first, the last, the last healthy one, and while they are few each change."""
    states = SavedStateTracker()
    truth: list[tuple[int, bool]] = []  # step and health of each that was saved
    kept: dict[int, SavedState] = {}
    waiting: list[Record] = []
    step, last_healthy = -1, None
    with mock.patch.multiple(saved_state_health, KEPT=FEW, MOST_CHANGES=changes, MOST_WAITING=10_000):
        for length, healthy, every in runs:
            for _ in range(length):
                step += 1
                last_healthy = step if healthy else last_healthy
                reasons = () if healthy else ("ill",)
                waiting.append(record(step, CheckpointHealth(healthy, last_healthy, reasons, last_healthy)))
                if step % every == 0:
                    states.take(taken(len(truth), step))
                    truth.append((step, healthy))
                if len(waiting) >= batch:
                    states.add(waiting)
                    waiting = []
                    kept |= kept_of(states, last=False)
        states.add(waiting)
        states.end(None)
        kept |= kept_of(states)
    count = len(truth)
    assert states.taken == count
    assert states.healthy == sum(healthy for _, healthy in truth)
    assert [(one.step, one.healthy) for one in kept.values()] == [truth[number] for number in kept]
    by_number = FEW + FEW // 2 * max(0, math.ceil(math.log2(max(1, count / FEW))))
    assert len(kept) <= by_number + 2 * changes + 2
    assert set(range(min(FEW, count))) | {count - 1} <= kept.keys()
    fit = [number for number, (_, healthy) in enumerate(truth) if healthy]
    assert not fit or fit[-1] in kept
    turns = [number for number in range(1, count) if truth[number][1] != truth[number - 1][1]]
    assert {each for turn in turns[:changes] for each in (turn - 1, turn)} <= kept.keys()


def test_ever_fewer_of_very_many_are_kept() -> None:
    """Of a million some five thousand: doubling the number adds half of the first thousand each time."""
    kept = sum(number % saved_state_health._every(number) == 0 for number in range(1_000_000))
    assert 5_000 < kept < 6_500
