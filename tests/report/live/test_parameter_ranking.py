"""Which parameters the live view names first."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.report.live.parameter_ranking import LEAST_USUAL, ranked

NAMES = ["a", "b", "c", "d"]


def norms(last: list[float], steps: int = 20) -> np.ndarray:
    return np.vstack([np.ones((steps, len(last)), np.float32), np.array([last], np.float32)])


def order(last: list[float], firing: dict[str, np.ndarray] | None = None) -> str:
    found = norms(last)
    lines = ranked(NAMES, found, np.ones(found.shape, bool), firing or {}, range(len(last)), 9)
    return "".join(line.name for line in lines)


@pytest.mark.parametrize(
    ("last", "first"),
    [([1, 1, 8, 1], "c"), ([1, 0.01, 8, 1], "b"), ([1, 1, 8, np.nan], "d"), ([1, 1, 8, 0.0], "d")],
)
def test_the_furthest_from_usual_is_first(last: list[float], first: str) -> None:
    """Up or down; what is not finite, or 0, before any factor."""
    assert order(last)[0] == first


def test_where_a_rule_fires_comes_before_a_larger_factor() -> None:
    """A parameter that a rule has named is shown, with the rule."""
    at = np.array([True, False, False, False])
    assert order([1, 1, 8, 1], {"spike": at})[0] == "a"
    found = norms([1, 1, 8, 1])
    line = ranked(NAMES, found, np.ones(found.shape, bool), {"spike": at}, range(4), 1)[0]
    assert line.firing == ("spike",)


def test_without_a_gradient_at_the_last_step_it_is_not_shown() -> None:
    """An expert that was not chosen is not off."""
    found = norms([1, 1, 8, 1])
    present = np.ones(found.shape, bool)
    present[-1, 2] = False
    assert "c" not in {line.name for line in ranked(NAMES, found, present, {}, range(4), 9)}


def test_too_few_norms_are_no_usual_one() -> None:
    """Before LEAST_USUAL norms the largest comes first, and no factor is said."""
    found = norms([1, 1, 8, 1], LEAST_USUAL - 1)
    line = ranked(NAMES, found, np.ones(found.shape, bool), {}, range(4), 1)[0]
    assert (line.name, np.isnan(line.usual)) == ("c", True)
