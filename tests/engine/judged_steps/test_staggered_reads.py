"""Laws of the phases: every site once in N steps, nearly equal parts, the same wherever they are asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.engine.judged_steps.staggered_reads import SMALLEST_PART, Staggering

SIZES = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40).map(
    lambda found: np.array(found, np.int64)
)
CADENCE = st.integers(2, 25)


@given(SIZES, CADENCE, st.integers(0, 10**6))
def test_every_site_is_due_once_in_a_cadence(numels: np.ndarray, every: int, step: int) -> None:
    """Any N steps in a row have each site due at exactly one of them, so no value is older than N steps."""
    staggering = Staggering(numels)
    counted = sum(staggering.due(every, later).astype(int) for later in range(step, step + every))
    assert (counted == 1).all()


@given(SIZES, CADENCE)
def test_no_step_reads_much_more_than_its_part(numels: np.ndarray, every: int) -> None:
    """At most 1/N of the elements and the largest site, or the smallest part that is worth a step and that site."""
    staggering = Staggering(numels)
    most = max(int(numels[staggering.due(every, step)].sum()) for step in range(every))
    fair = max(numels.sum() / min(every, max(1, -(-int(numels.sum()) // SMALLEST_PART))), 0)
    assert most <= fair + numels.max()


@given(SIZES, CADENCE)
def test_a_small_model_is_read_at_one_step(numels: np.ndarray, every: int) -> None:
    """Sites that together have no more elements than the smallest part share a phase, which is not step 0."""
    small = np.maximum(numels % (SMALLEST_PART // len(numels)), 1)
    assert set(Staggering(small).phases(every).tolist()) == {1 % every}


@given(SIZES, CADENCE, st.data())
def test_a_part_keeps_its_phases(numels: np.ndarray, every: int, data: st.DataObject) -> None:
    """A rank that holds some of the sites reads them at the steps at which the others expect it."""
    own = np.array(data.draw(st.lists(st.integers(0, len(numels) - 1), unique=True)), np.intp)
    whole = Staggering(numels)
    assert (whole.of(own).phases(every) == whole.phases(every)[own]).all()


def test_modules_take_turns() -> None:
    """Sites without elements of their own, among others that have some, are due one after the other."""
    assert Staggering(np.array([7, 0, 0, 0, 9])).phases(3).tolist() == [1, 1, 2, 0, 1]
