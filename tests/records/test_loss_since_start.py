"""The loss of one optimizer beside that of its first step."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.records.loss_since_start import FEWEST, STEPS, LossSinceStart

LOSSES = st.lists(st.none() | st.sampled_from([0.5, 1.0, 3.0, -2.0, 1e9, math.inf, math.nan]), max_size=120)


@given(LOSSES, st.integers(0, 120))
def test_saved_anywhere_and_in_pieces_it_says_the_same(losses: list[float | None], cut: int) -> None:
    """Added at once, or in two parts with a checkpoint between them."""
    whole, part = LossSinceStart(), LossSinceStart()
    whole.add(losses)
    part.add(losses[:cut])
    resumed = LossSinceStart(json.loads(json.dumps(part.to_dict(), allow_nan=False)))
    resumed.add(losses[cut:])
    assert (resumed.to_dict(), resumed.no_better) == (whole.to_dict(), whole.no_better)


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
    found = LossSinceStart()
    found.add(losses)
    assert found.no_better is no_better
