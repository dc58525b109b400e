"""The Events of a rule's transition: it begins to fire, goes on, is resolved, or reaches a rung (`escalate`).

Axes: K series of one rule.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.actions.escalation import alarm_due, climbed, ordered
from gradwatch.engine.firing import NEVER, FiringState, Moved, at_rest
from gradwatch.engine.reporting.culprit import culprit, may_have_moved
from gradwatch.engine.reporting.events import NOTHING_JOINED, Joined, Notice, build_event
from gradwatch.engine.reporting.incident_inhibition import inhibitor, most, released
from gradwatch.engine.rule_plan import RulePlan
from gradwatch.engine.scores import Scored, worst_first
from gradwatch.records.columns import RANK_COLUMNS
from gradwatch.records.event import EventKind, Severity
from gradwatch.records.snapshot import BoolArray

if TYPE_CHECKING:
    from gradwatch.engine.judge import Step


def report_move(
    judged: Step, number: int, was: FiringState, moved: Moved, scored: Scored, acted: int
) -> FiringState:
    """Emit the Events of a transition; gives the FiringState after them.

    `acted` is the number of optimizer steps in a row on which the rule acted, 0 = it does not act now.
    """
    one = judged.plan.rules[number]
    rule, step, track = one.rule, judged.snapshot.step, moved.track
    own = f"{rule.id}-{judged.snapshot.optimizer}-"
    was_firing, firing = bool(was.firing.any()), bool(track.firing.any())
    if firing and not was_firing:
        involved = scored.breach & track.firing
        inhibited = inhibitor(judged.plan, number, judged.tracks, involved, partial(_moved_most, judged))
        recently = was.resolved_at != NEVER and step - was.resolved_at <= rule.cooldown
        reopened = recently and was.incident.startswith(own)
        incident = inhibited or (was.incident if reopened else f"{own}{step}")
        track = track._replace(incident=incident)
        _emit(judged, number, scored, acted, "firing", incident, involved, not (reopened or inhibited))
    elif firing and released(judged.plan, number, track, judged.tracks):
        track = _on_its_own(judged, number, track, scored, acted)
    elif was_firing and not firing:
        track = track._replace(resolved_at=step)
        _emit(judged, number, scored, 0, "resolved", track.incident, moved.resolved, True)
    elif not firing and was.idle and track.streak.any():
        _emit(judged, number, scored, acted, "pending", "", scored.breach, True)
    alarm = alarm_due(one, acted)
    if alarm or (was_firing and firing and acted):
        _emit(judged, number, scored, acted, "repeat", track.incident, scored.breach, alarm)
    if acted and set(climbed(one, track, step)) - set(climbed(one, was, max(was.acted, default=NEVER))):
        _emit(judged, number, scored, acted, "escalated", track.incident, scored.breach, True)
    return track if firing or track.streak.any() else at_rest(track)


def _on_its_own(judged: Step, number: int, track: FiringState, scored: Scored, acted: int) -> FiringState:
    """A rule goes on firing, and the one that reported it does not: another one reports it, or it does so itself.

    Not where it only has not cleared yet: what was one fact is over.
    """
    involved = scored.breach & track.firing
    if not involved.any():
        return track
    inhibited = inhibitor(judged.plan, number, judged.tracks, involved, partial(_moved_most, judged))
    incident = (
        inhibited or f"{judged.plan.rules[number].rule.id}-{judged.snapshot.optimizer}-{judged.snapshot.step}"
    )
    if not inhibited:
        _emit(judged, number, scored, acted, "firing", incident, involved, True)
    return track._replace(incident=incident)


def _emit(
    judged: Step,
    number: int,
    scored: Scored,
    acted: int,
    kind: EventKind,
    incident: str,
    involved: BoolArray,
    notify: bool,
) -> None:
    one = judged.plan.rules[number]
    alarm = kind == "escalated" or (kind == "repeat" and notify)
    severity: Severity = "critical" if alarm else one.rule.severity
    due = judged.due.get(one.rule.id)
    actions = ordered(one, acted, () if due is None else due.climbed)
    notice = Notice(kind, incident, involved, severity, actions, notify)
    moved = _moved_most(judged, number)
    joined = _joined(judged, one)
    judged.events.append(
        build_event(one.rule, one.shown, scored, notice, judged.snapshot, judged.rank, moved, joined)
    )


def _joined(judged: Step, one: RulePlan) -> Joined:
    """The rules that hold, of a rule with a condition, and what those that are firing now are about."""
    condition = next((each for each in judged.plan.conditions if judged.plan.rules[each.number] is one), None)
    if condition is None:
        return NOTHING_JOINED
    depths: dict[str, int] = {}
    moved = ""
    for number in sorted(condition.of):
        other, firing = judged.plan.rules[number], judged.tracks[number].firing
        if firing.any() and other.series.column not in RANK_COLUMNS:
            named = (
                (other.shown.names[k], int(other.shown.depths[k])) for k in _worst(judged, other, firing)
            )
            depths = {name: depth for name, depth in named if name} | depths
            moved = moved or _moved_most(judged, number)
    rules = ", ".join(condition.rules_that_hold(judged.tracks, judged.snapshot.step))
    return Joined(rules, tuple(depths), max(depths, key=depths.__getitem__) if depths else moved)


def _worst(judged: Step, one: RulePlan, firing: BoolArray) -> NDArray[np.intp]:
    """The series of a rule that are firing, the worst first; in order where they were not judged at this step."""
    scored = judged.scored(one, idle=False)
    if len(scored.score) != len(firing):
        return np.flatnonzero(firing)
    return worst_first(one.detector, scored, one.shown.depths, firing)


def _moved_most(judged: Step, number: int) -> str:
    """The parameter that moved a total most; "" = no single one.

    Where none stands apart by its usual level it is the worst of those that breach a rule which this one inhibits,
    unless that is most of them.
    """
    one = judged.plan.rules[number]
    found = culprit(judged.plan, judged.baselines, one, judged.snapshot)
    if found or one.detector.comparison == "below":
        return found
    for other, inhibitors in zip(judged.plan.rules, judged.plan.inhibitors, strict=True):
        if number in inhibitors and other.series.scope == "param" and other.series.column == "norm":
            scored = judged.scored(other, idle=True)
            if scored.breach.any() and not most(scored.breach):
                worst = worst_first(other.detector, scored, other.series.depths, scored.breach)
                names = (other.series.names[k] for k in worst)
                return next((name for name in names if may_have_moved(judged.snapshot, name)), "")
    return ""
