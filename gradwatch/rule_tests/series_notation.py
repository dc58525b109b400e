"""The values of a series as promtool writes them: `1 1.5 NaN`, `1x30`, `0.5+0.1x9`, `_x3`.

Source: the documentation of `promtool test rules` (unit testing for rules, "series"). `axn` is n + 1 times a, `a+bxn`
n + 1 values that begin with a and grow by b, `_` a missing sample and `_xn` n of them. Values are optimizer steps.
"""

from __future__ import annotations

import math
import re

MOST_STEPS = 100_000
"""Steps of one test: some seconds of work."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?Inf|NaN"
_MISSING = re.compile(r"_(?:x(?P<times>\d+))?")
_VALUES = re.compile(
    rf"(?P<first>{_NUMBER})(?:(?P<sign>[+-])(?P<by>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)x(?P<steps>\d+)"
    r"|x(?P<times>\d+))?"
)


class NotationError(ValueError):
    """A word that is no sample; `offset` is where in the text it starts, `length` its characters."""

    def __init__(self, message: str, offset: int, length: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.length = length


def expand(text: str) -> list[float | None]:
    """The samples of a series, None where one is missing. Raises `NotationError`."""
    samples: list[float | None] = []
    for word in re.finditer(r"\S+", text):
        found = _samples(word.group(), MOST_STEPS - len(samples))
        if found is None:
            message = f"{word.group()[:40]!r} is no sample: a number, NaN, Inf, _, axn, a+bxn, a-bxn or _xn"
        elif len(samples) + len(found) > MOST_STEPS:
            message = f"more than {MOST_STEPS:,} steps"
        else:
            samples += found
            continue
        raise NotationError(message, word.start(), len(word.group()))
    return samples


def _samples(word: str, room: int) -> list[float | None] | None:
    """The samples of one word, cut just beyond `room`; None for a word that is none."""
    missing = _MISSING.fullmatch(word)
    if missing:
        return [None] * _count(missing["times"] or "1", room)
    values = _VALUES.fullmatch(word)
    if not values:
        return None
    first = float(values["first"])
    by = float(values["by"] or 0.0) * (-1.0 if values["sign"] == "-" else 1.0)
    count = _count(values["steps"] or values["times"] or "0", room) + 1
    return [first + by * k if by and math.isfinite(first) else first for k in range(count)]


def _count(digits: str, room: int) -> int:
    return min(int(digits[:10]), room + 1)
