"""Due actions of a rule: those of its `do:`, more of them the longer it goes on.

A rung, `escalate: {after: k in n, to: action}`, stands while the rule's actions were due on at least k of the last n
optimizer steps, this one included; what it adds comes on top of the rest of `do:` and ends with the window.
"""

from __future__ import annotations

from functools import cache

from gradwatch.engine.firing import FiringState
from gradwatch.engine.rule_plan import RulePlan
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.rule_set import Action


@cache
def pace(after: str) -> tuple[int, int]:
    """(k, n) of `k in n`."""
    times, steps = after.split(" in ")
    return int(times), int(steps)


def rungs(one: RulePlan) -> list[Action]:
    """Its `escalate` actions, in the order of the file."""
    return [action for action in one.rule.do if action.name == "escalate"]


def remembered(one: RulePlan, track: FiringState, step: int) -> FiringState:
    """The FiringState that knows that the rule's actions were due on this step."""
    most = max((pace(action.params["after"])[0] for action in rungs(one)), default=0)
    return track._replace(acted=(*track.acted, step)[-most:]) if most else track


def climbed(one: RulePlan, track: FiringState, step: int) -> tuple[str, ...]:
    """The actions of the rungs that stand at this step, each once."""
    names: dict[str, None] = {}
    for action in rungs(one):
        times, steps = pace(action.params["after"])
        if sum(step - steps < acted <= step for acted in track.acted) >= times:
            names[str(action.params["to"])] = None
    return tuple(names)


def exhausted(one: RulePlan, acted: int) -> bool:
    """True if the rule has skipped its `max_consecutive` and is to stop training instead."""
    limit, skip = one.max_consecutive, one.skip
    return skip is not None and limit is not None and acted > limit and skip.params.get("then") == "stop"


def alarm_due(one: RulePlan, acted: int) -> bool:
    """True if `max_consecutive` skips in a row have been used up: then, and at every multiple of it."""
    limit = one.max_consecutive
    return limit is not None and acted > limit and (acted - 1) % limit == 0


def due_actions(one: RulePlan, acted: int, rungs_reached: tuple[str, ...]) -> tuple[str, ...]:
    """The actions due having acted on this many steps in a row, each once; none at 0."""
    if not acted:
        return ()
    names = dict.fromkeys(action.name for action in one.rule.do if action.name != "escalate")
    names |= dict.fromkeys(rungs_reached)
    if not {"skip_step", "stop"}.isdisjoint(names):
        names = {name: None for name in names if not _overridden(name)}
    return (*names, "stop") if exhausted(one, acted) and "stop" not in names else tuple(names)


def _overridden(name: str) -> bool:
    """True if a step that is skipped or stopped leaves nothing to do for the action."""
    return ACTIONS[name].changes_gradients and not ACTIONS[name].later


def ordered(one: RulePlan, acted: int, rungs_reached: tuple[str, ...]) -> tuple[str, ...]:
    """Actions named in an Event: `due_actions`, or nothing in shadow mode."""
    return () if one.rule.mode == "shadow" else due_actions(one, acted, rungs_reached)
