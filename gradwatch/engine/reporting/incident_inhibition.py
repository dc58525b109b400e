"""Inhibition: a rule that begins to fire for the same reason as another one opens no second incident.

Axes: K series of one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradwatch.engine.firing import FiringState
from gradwatch.engine.rule_plan import Plan, RulePlan
from gradwatch.records.event import SEVERITIES
from gradwatch.records.snapshot import BoolArray


def inhibitor(
    plan: Plan,
    number: int,
    tracks: Sequence[FiringState],
    involved: BoolArray,
    moved_most: Callable[[int], str],
) -> str:
    """The id of the incident that a rule which begins to fire is part of; "" if it opens one of its own.

    It is the incident of the first rule in its `inhibited_by` that fires, has the same or a higher severity, and is
    about the same: both about a total, or with a parameter in common, or one about a total and the other about most
    parameters. A rule that acts always reports for itself. `involved` bool[K] are its series. `moved_most` gives, by
    the number of a rule on a total, the parameter that moved that most; "" if most parameters did.
    """
    one = plan.rules[number]
    if one.rule.do:
        return ""
    own = _names(one, involved)
    for other_number in plan.inhibitors[number]:
        other, track = plan.rules[other_number], tracks[other_number]
        if track.idle or not track.firing.any() or _gravity(other) < _gravity(one):
            continue
        others = _names(other, track.firing)
        # One of them is about the whole: then what moved that is asked for.
        if not (own and others) and (own or others):
            moved = moved_most(other_number if own else number)
            of_one_cause = moved in (own or others) if moved else most(involved if own else track.firing)
        else:
            of_one_cause = own == others or not own.isdisjoint(others)
        if of_one_cause:
            return track.incident
    return ""


def released(plan: Plan, number: int, track: FiringState, tracks: Sequence[FiringState]) -> bool:
    """True if a rule fires in the incident of another one, and none that inhibits it fires in that any more.

    `track` is its own FiringState, `tracks` are those of all rules.
    """
    if not plan.inhibitors[number]:
        return False
    if track.idle or not track.firing.any() or _is_own(plan.rules[number].rule.id, track.incident):
        return False
    others = (tracks[other] for other in plan.inhibitors[number])
    return not any(other.incident == track.incident and other.firing.any() for other in others)


def _is_own(rule: str, incident: str) -> bool:
    """True of `RULE-OPTIMIZER-STEP`."""
    rest = incident.removeprefix(f"{rule}-")
    return rest != incident and rest.count("-") == 1 and rest.replace("-", "").isdigit()


def most(involved: BoolArray) -> bool:
    """True if more than three quarters of at least three series are involved: then no single one is at fault."""
    return len(involved) > 2 and 4 * int(np.count_nonzero(involved)) > 3 * len(involved)


def _gravity(one: RulePlan) -> int:
    return SEVERITIES.index(one.rule.severity)


def _names(one: RulePlan, involved: BoolArray) -> frozenset[str]:
    """The names of the series involved; none of a total."""
    return frozenset(name for name, here in zip(one.shown.names, involved, strict=True) if here and name)
