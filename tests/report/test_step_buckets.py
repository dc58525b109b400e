"""Buckets of steps: no value is lost however many steps there are, and memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.report.step_buckets import Counts, Envelope, StepAxis

NUMBERS = st.one_of(st.floats(0, 1e30), st.sampled_from([float("nan"), float("inf"), 0.0]), st.none())
STEPS = st.lists(st.tuples(st.integers(0, 5000), NUMBERS), min_size=1, max_size=60)


@given(STEPS, st.integers(1, 7), st.sampled_from([2, 4, 16]))
def test_every_value_lies_in_the_bounds_of_its_bucket(
    steps: list[tuple[int, float | None]], batch: int, most: int
) -> None:
    """Each bucket has the smallest and the largest finite value of its steps exactly, and whether one was not finite.

    In whatever order and in whatever batches steps come.
    """
    axis = StepAxis(most)
    envelope, counts = Envelope(axis, 1), Counts(axis, 1)
    for at in range(0, len(steps), batch):
        part = steps[at : at + batch]
        slots = axis.slots([step for step, _ in part])
        values = np.array([[np.nan if value is None else value] for _, value in part])
        present = np.array([[value is not None] for _, value in part])
        envelope.add(slots, values, present, np.array([0]))
        counts.add(slots, np.ones((len(part), 1), int))
    assert axis.count <= most
    assert counts.sums.sum() == len(steps)
    for at, start in enumerate(axis.starts):
        inside = [value for step, value in steps if start <= step < start + axis.width]
        finite = [value for value in inside if value is not None and np.isfinite(value)]
        assert counts.sums[at, 0] == len(inside)
        assert envelope.low[at, 0] == min(finite, default=np.inf)
        assert envelope.high[at, 0] == max(finite, default=-np.inf)
        assert envelope.bad[at, 0] == any(value is not None and not np.isfinite(value) for value in inside)


def test_one_step_each_while_there_is_room() -> None:
    """Short runs are not downsampled at all."""
    axis = StepAxis(8)
    assert axis.slots([3, 4, 10]).tolist() == [0, 1, 7]
    assert (axis.width, axis.starts) == (1, list(range(3, 11)))


def test_columns_may_be_added() -> None:
    """What was there before stays; the new ones begin empty."""
    axis = StepAxis(4)
    envelope = Envelope(axis, 1)
    envelope.add(axis.slots([0]), np.array([[2.0]]), np.array([[True]]), np.array([0]))
    envelope.widen(3)
    envelope.add(axis.slots([1]), np.array([[5.0]]), np.array([[True]]), np.array([2]))
    assert envelope.high[:2, [0, 2]].tolist() == [[2.0, -np.inf], [-np.inf, 5.0]]


@pytest.mark.parametrize("step", [2**62, 10**15])
def test_a_step_far_away_makes_buckets_wide(step: int) -> None:
    """Any number that a journal may hold fits, without a loop over what lies between."""
    axis = StepAxis(4)
    axis.slots([0, 1])
    assert axis.slots([step]).tolist() == [step // axis.width]
    assert axis.count <= 4
