"""All conditions of a plan at one step: their values, and those that may change although no other rule does."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from gradwatch.engine.conditions.bound_condition import BoundCondition
from gradwatch.engine.firing import FiringState


def values_of(
    conditions: Sequence[BoundCondition],
    tracks: Sequence[FiringState],
    unjudged: AbstractSet[int],
    step: int,
    unreached: AbstractSet[int] = frozenset(),
) -> dict[int, bool | None]:
    """The value of each condition, by its number; a condition comes after those that it names.

    That of a rule which is `unreached` (its `from_step` is to come) is not known.
    """
    values: dict[int, bool | None] = {}
    for one in conditions:
        values[one.number] = None if one.number in unreached else one.value(tracks, unjudged, values, step)
    return values


def with_unsettled(
    conditions: Sequence[BoundCondition], tracks: Sequence[FiringState], active: frozenset[int], step: int
) -> frozenset[int]:
    """The numbers of the rules that are `active`, and of those whose condition may change by itself."""
    for one in conditions:
        if one.unsettled(tracks, active, step):
            active |= {one.number}
    return active
