"""Laws of arrivals: how often each gradient came, whatever the backwards of a window reached."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.capture.window.arrival_counts import ArrivalCounts

POSITIONS = {7: 0, 3: 1, 11: 2, 4: 3}
"""Slots of the parameters of one optimizer; those of others are 1 and 2."""
SLOTS = st.sampled_from([*POSITIONS, 1, 2])
BACKWARDS = st.lists(st.lists(SLOTS, max_size=6), max_size=4)


def arrivals() -> ArrivalCounts:
    """Of four parameters that have gradients."""
    params = [torch.zeros(2, requires_grad=True) for _ in POSITIONS]
    for param in params:
        param.grad = torch.ones(2)
    return ArrivalCounts(params, POSITIONS)


@given(st.lists(BACKWARDS, min_size=1, max_size=4))
def test_each_gradient_is_counted_as_often_as_it_arrived(windows: list[list[list[int]]]) -> None:
    """Window after window, by the same lists, equal ones, or others; what is of other optimizers does not count."""
    found = arrivals()
    for backwards in (window for window in windows for _ in range(2)):
        here = [touched for touched in backwards if POSITIONS.keys() & set(touched)]
        assert [found.add(touched) for touched in backwards] == [touched in here for touched in backwards]
        counts = Counter(POSITIONS[slot] for touched in here for slot in touched if slot in POSITIONS)
        calls = found.counted()
        assert calls.tolist() == [counts[k] for k in range(4)]
        assert found.counted() is calls
        assert found.complete == (len(counts) == 4)
        assert found.count == len(here)
        found.restart()
        assert not found.counted().any()


def test_steps_that_are_alike_have_the_same_counts() -> None:
    """The very array of the step before, by which others know that nothing has changed; corrected ones too."""
    found = arrivals()
    made = []
    for _ in range(2):
        found.add([7, 3, 1, 11])
        made.append((found.counted(), found.corrected(absent=[0], without_backward=[3])))
        found.restart()
    (first, corrected), (second, again) = made
    assert first is second
    assert corrected is again
    assert corrected.tolist() == [0, 1, 1, 1]


def test_gradients_that_were_cleared_count_no_more() -> None:
    """`zero_grad()` between two backwards: noticed as the second begins, by the gradient that came last."""
    found = arrivals()
    found.add([7, 3])
    assert not found.begins()
    found._params[1].grad = None
    assert found.begins()
    assert (found.count, found.cleared, found.counted().any()) == (1, 1, False)
