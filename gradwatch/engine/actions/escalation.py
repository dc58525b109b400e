"""Due actions of a rule: those of its `do:`, and more of them the longer its condition lasts.

A rung, `escalate: {after: k in n, to: action}`, is reached while the rule's actions were due on at least k of the last
n optimizer steps, this one included. What it adds comes on top of the rest of `do:`, and ends with the window.
"""

from __future__ import annotations

from functools import cache

from gradwatch.engine.firing import FiringState
from gradwatch.engine.rule_plan import RulePlan
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.rule_set import Action


@cache
def pace(after: str) -> tuple[int, int]:
    """(k, n), in optimizer steps, of the text `k in n`, which the loader has checked."""
    times, steps = after.split(" in ")
    return int(times), int(steps)


def rungs(one: RulePlan) -> list[Action]:
    """The `escalate` actions of a rule, in the order of the file."""
    return [action for action in one.rule.do if action.name == "escalate"]


def remembered(one: RulePlan, track: FiringState, step: int) -> FiringState:
    """The FiringState with `step` added to the last steps on which the rule's actions were due."""
    most = max((pace(action.params["after"])[0] for action in rungs(one)), default=0)
    return track._replace(acted=(*track.acted, step)[-most:]) if most else track


def climbed(one: RulePlan, track: FiringState, step: int) -> tuple[str, ...]:
    """The actions of the rungs that are reached at this step, each once."""
    names: dict[str, None] = {}
    for action in rungs(one):
        times, steps = pace(action.params["after"])
        if sum(step - steps < acted <= step for acted in track.acted) >= times:
            names[str(action.params["to"])] = None
    return tuple(names)


def exhausted(one: RulePlan, acted: int) -> bool:
    """True if the rule has skipped `max_consecutive` steps in a row and now stops training (`then: stop`).

    `acted` is the number of optimizer steps in a row on which its actions were due.
    """
    limit, skip = one.max_consecutive, one.skip
    return skip is not None and limit is not None and acted > limit and skip.params.get("then") == "stop"


def alarm_due(one: RulePlan, acted: int) -> bool:
    """True on the step after `max_consecutive` skips in a row, and after every further `max_consecutive` of them.

    `acted` is the number of optimizer steps in a row on which the rule's actions were due.
    """
    limit = one.max_consecutive
    return limit is not None and acted > limit and (acted - 1) % limit == 0


def due_actions(one: RulePlan, acted: int, rungs_reached: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the actions that are due, each once; none where `acted` is 0.

    `acted` is the number of optimizer steps in a row on which the rule acted, this one included; `rungs_reached` is
    what `climbed` gave.
    """
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
    """The names of the actions in an Event: `due_actions`, or none in shadow mode."""
    return () if one.rule.mode == "shadow" else due_actions(one, acted, rungs_reached)
