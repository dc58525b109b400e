"""The agreement on a step after which all ranks act, over a real store, in every order of what happens."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.distributed import all_ranks_or_none
from gradwatch.distributed.all_ranks_or_none import CommonStep
from gradwatch.records.run_info import RunInfo


def ranks(world: int) -> list[CommonStep]:
    """One part a rank, over one store."""
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_ranks_or_none, "prefix_store", lambda _: dist.PrefixStore("common", store))
        return [CommonStep(RunInfo("r", "", rank=rank, world_size=world)) for rank in range(world)]


@given(world=st.integers(1, 4), ahead=st.integers(0, 6), seed=st.integers(0, 10_000))
def test_all_ranks_act_after_the_same_step_or_none_does(world: int, ahead: int, seed: int) -> None:
    """Whichever rank steps, plans, reads or decides first: no thread waits for a training, nor a training for one."""
    parts, order = ranks(world), random.Random(seed)
    at = 3 + ahead
    acted: list[int | None] = [None] * world
    ready: dict[int, bool] = {}
    decided = False
    while not all(part.steps >= at + 3 for part in parts):
        rank = order.randrange(world)
        part = parts[rank]
        match order.randrange(4):
            case 0 | 1:
                # Ranks that train together are never more than a step apart.
                if part.steps <= min(one.steps for one in parts) and part.stepped():
                    assert acted[rank] is None
                    acted[rank] = part.steps
            case 2 if rank not in ready:
                ready[rank] = part.plan("a", at)
            case 3 if rank == 0 and len(ready) == world and not decided:
                decided = True
                if all(ready.values()):
                    part.decide_for("a")
                else:
                    part.decide_against("a")
            case 3:
                part.decision("a")
    assert set(acted) in ({at}, {None})
    if set(acted) == {at}:
        assert all(ready.values())
        assert decided


def test_a_rank_that_knows_the_decision_does_not_ask_the_store() -> None:
    """The training thread asks the store only where the decision is not known by then."""
    (one,) = ranks(1)
    assert one.plan("a", 2)
    assert one.decide_for("a")
    one._store = None
    assert [one.stepped() for _ in range(3)] == [False, True, False]


def test_a_step_that_has_come_is_no_common_one() -> None:
    """Nor is one that a later round plans before all have come to it: each has a name of its own."""
    (one,) = ranks(1)
    one.stepped()
    assert not one.plan("a", 1)
    assert one.plan("b", 2)
    assert not one.stepped()  # decided against: it knows of nothing
    assert one.decision("b") is False
    assert not one.decide_for("b")
    assert one.plan("c", one.ahead([one.steps], 0.0))
    assert one.decide_for("c")
    assert [one.stepped() for _ in range(3)] == [False, True, False]


def test_what_ranks_post_is_read_once_all_have_posted_it() -> None:
    """No rank waits: until then there is nothing to read."""
    parts = ranks(2)
    parts[1].post("answer/1", {"steps": 3})
    assert parts[0].read("answer/0") is None
    assert parts[0].read_all("answer") is None
    parts[0].post("answer/0", {"steps": 2})
    assert parts[1].read_all("answer") == [{"steps": 2}, {"steps": 3}]
