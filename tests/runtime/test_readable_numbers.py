"""Times and values as people read them."""

from __future__ import annotations

import math

import pytest

from gradwatch.runtime.readable_numbers import ago, duration, number


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (45.04, "45.0 s"),
        (59.96, "1 min 0 s"),
        (250.0, "4 min 10 s"),
        (11_531.0, "3 h 12 min"),
        (math.nan, "an unknown time"),
        (math.inf, "an unknown time"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, said: str) -> None:
    """Rounded before it is cut, so that there are never 60 seconds."""
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3.0, "just now"),
        (1.9, "just now"),
        (45.0, "45 s ago"),
        (119.0, "119 s ago"),
        (180.0, "3 min ago"),
        (7_200.0, "2 h ago"),
        (180_000.0, "2 d ago"),
    ],
)
def test_a_moment_is_told_in_one_unit(seconds: float, said: str) -> None:
    """A clock that was set back says the present."""
    assert ago(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.000123456, "0.0001235"), (1e9, "1e+09"), (math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "-Inf")],
)
def test_a_value_has_four_digits_or_a_name(value: float, said: str) -> None:
    """As pages and terminals show norms."""
    assert number(value) == said
    assert number(12345.0, 3) == "1.23e+04"
