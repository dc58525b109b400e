"""The loss of one optimizer beside that of its first step, and that of healthy weights."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.records.loss_comparison import FEWEST, STEPS, STEPS_TO_SHOW, LossComparison

LOSSES = st.lists(st.none() | st.sampled_from([0.5, 1.0, 3.0, -2.0, 1e9, math.inf, math.nan]), max_size=120)


@given(LOSSES, st.integers(0, 120))
def test_saved_anywhere_and_in_pieces_it_says_the_same(losses: list[float | None], cut: int) -> None:
    """Added at once, or in two parts with a checkpoint between them."""
    for marked in (False, True):
        whole, part = LossComparison(), LossComparison()
        for one in (whole, part):
            if marked:
                one.add([1.0, 0.9])
                one.mark_healthy()
                one.mark_grown()
        whole.add(losses)
        part.add(losses[:cut])
        resumed = LossComparison(json.loads(json.dumps(part.to_dict(), allow_nan=False)))
        resumed.add(losses[cut:])
        assert resumed.to_dict() == whole.to_dict()
        assert (resumed.no_better, resumed.lower_since_grown) == (whole.no_better, whole.lower_since_grown)


@pytest.mark.parametrize(
    ("losses", "no_better"),
    [
        ([1.0], False),
        ([1.0] * FEWEST, False),
        ([1.0] * (1 + FEWEST), True),
        ([math.nan, math.inf, 1.0] + [0.9] * 30, False),
        ([1.0] + [math.nan] * 30, True),
        ([-1.0] + [-2.0] * 30, False),
        ([-1.0] + [-0.5] * 30, True),
        ([1.0] + [1e30] * 10 + [0.5] * 15, False),
        ([1.0] + [0.5] * 500 + [2.0] * 20, False),
        ([1.0] + [0.5] * 500 + [2.0] * STEPS, True),
        ([None] * 50, False),
    ],
)
def test_most_of_the_recent_losses_decide(losses: list[float | None], no_better: bool) -> None:
    """By how many are not below the first that is finite, not by how large they are; NaN is not below."""
    found = LossComparison()
    found.add(losses)
    assert found.no_better is no_better


@pytest.mark.parametrize(
    ("healthy", "since", "lower"),
    [
        ([0.6], [0.5] * (STEPS_TO_SHOW - 1), False),
        ([0.6], [0.5] * STEPS_TO_SHOW, True),
        ([0.4], [0.5] * STEPS_TO_SHOW, False),
        ([2.0], [0.5] * STEPS_TO_SHOW, True),
        ([2.0], [1.5] * STEPS_TO_SHOW, False),
        ([0.6], [0.5] * 95 + [1e30] * 5, True),
        ([0.6], [0.5] * 80 + [0.7] * 20, False),
        ([0.6], [0.5] * 80 + [math.nan] * 20, False),
        ([0.6], [1e6] * 300 + [0.5] * 300, True),
        ([0.6], [None] * 200, False),
    ],
)
def test_nearly_all_losses_since_weights_grew_are_lower(
    healthy: list[float | None], since: list[float | None], lower: bool
) -> None:
    """Lower than the first, 1, and than the mean when the weights were healthy; 100 of them at least."""
    found = LossComparison()
    found.add([1.0, *healthy])
    found.mark_healthy()
    found.add([1e-9] * 40)  # between a healthy look and the one that finds them grown: of neither
    found.mark_grown()
    assert not found.lower_since_grown
    found.add(since[:1])
    found.mark_grown()  # every later look finds it anew
    found.add(since[1:])
    assert found.lower_since_grown is lower
    found.mark_healthy()
    assert not found.lower_since_grown


def test_where_no_loss_is_known_none_is_lower() -> None:
    """Marks without a loss before them."""
    found = LossComparison()
    found.mark_healthy()
    found.mark_grown()
    found.add([1.0] + [0.5] * 200)
    assert not found.lower_since_grown
