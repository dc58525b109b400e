"""A row of characters for a row of numbers."""

from __future__ import annotations

import math

import pytest

from gradwatch.report.live.sparkline import BARS, sparkline


def test_heights_follow_the_values() -> None:
    """The smallest is the lowest bar and the largest the highest; on a logarithmic scale factors are equal steps."""
    assert sparkline([0.0, 5.0, 10.0], 8, logarithmic=False) == BARS[0] + BARS[4] + BARS[7]
    assert sparkline([1e-4, 2.0, 1e4], 8, logarithmic=True) == BARS[0] + BARS[4] + BARS[7]


def test_a_spike_is_kept_whatever_the_width() -> None:
    """One character stands for the largest of several values, so that a single step is not lost."""
    values = [1.0] * 1000
    values[700] = 1e6
    drawn = sparkline(values, 20, logarithmic=True)
    assert len(drawn) == 20
    assert drawn.count(BARS[7]) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_marked(bad: float) -> None:
    """NaN and Inf are an exclamation mark, also among others of one character."""
    assert sparkline([1.0, bad, 1.0], 3, logarithmic=True)[1] == "!"
    assert "!" in sparkline([1.0] * 50 + [bad] + [1.0] * 50, 10, logarithmic=False)


def test_noise_is_no_spike() -> None:
    """Values that scatter by less than a factor of 4 do not fill the height."""
    drawn = sparkline([1.0, 1.05, 0.95, 1.0], 4, logarithmic=True)
    assert BARS[0] not in drawn
    assert BARS[7] not in drawn


def test_nothing_and_zeros_are_drawn() -> None:
    """No value is no character; zeros, which have no logarithm, are the lowest bar."""
    assert sparkline([], 8, logarithmic=True) == ""
    assert sparkline([0.0, 0.0, 1.0], 8, logarithmic=True)[:2] == BARS[0] * 2
