"""A row of characters for a row of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
NOT_FINITE = "!"
LEAST_FACTOR = 4.0
"""Largest ÷ smallest that fills the height, at least: what scatters by less is drawn flat rather than as a spike."""


def sparkline(values: Sequence[float], width: int, *, logarithmic: bool, bars: str = BARS) -> str:
    """The last `values`, the newest at the right, in at most `width` characters.

    Where there are more, one character is the largest of several. NaN and Inf are drawn as `!`. On a logarithmic scale
    0 is the lowest bar.
    """
    buckets = _buckets(values, width)
    heights = [_height(each, logarithmic) for each in buckets]
    finite = [each for each in heights if each is not None and each > -math.inf]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    middle, least = (low + high) / 2, math.log(LEAST_FACTOR) if logarithmic else abs(low + high) / 20
    if high - low < least:
        low, high = middle - least / 2, middle + least / 2
    return "".join(NOT_FINITE if each is None else _bar(each, low, high, bars) for each in heights)


def _buckets(values: Sequence[float], width: int) -> list[Sequence[float]]:
    if len(values) <= width:
        return [[each] for each in values]
    edges = [round(at * len(values) / width) for at in range(width + 1)]
    return [values[begin:end] for begin, end in pairwise(edges)]


def _height(values: Sequence[float], logarithmic: bool) -> float | None:
    """The height of the largest; None where one is NaN or Inf."""
    if not all(map(math.isfinite, values)):
        return None
    largest = max(values)
    if not logarithmic:
        return largest
    return math.log(largest) if largest > 0 else -math.inf


def _bar(height: float, low: float, high: float, bars: str) -> str:
    if height == -math.inf or high <= low:
        return bars[0]
    return bars[min(len(bars) - 1, int((height - low) / (high - low) * len(bars)))]
