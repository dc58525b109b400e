"""The stages of a run: which rules are not judged yet, as their `from_step` is still to come.

A stage is part of the state of an engine, so that a step asks only whether its number lies within.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Stage(NamedTuple):
    """The steps from `first` to before `end`, at which the rules with the numbers `unreached` judge nothing."""

    first: int
    end: int
    unreached: frozenset[int]


WHOLE_RUN = Stage(0, sys.maxsize, frozenset())
"""Where no rule has a `from_step`."""


def stages_of(from_steps: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of rules with these first steps, in the order of their numbers; together they are the whole run."""
    return tuple(
        Stage(first, end, frozenset(number for number, start in enumerate(from_steps) if start > first))
        for first, end in pairwise(sorted({0, sys.maxsize, *from_steps}))
    )


def stage_at(stages: Iterable[Stage], step: int) -> Stage:
    """The stage that a step is in."""
    return next(one for one in stages if step < one.end)
