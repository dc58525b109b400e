"""The speed gradwatch is meant to reach, each as a ratio of what it adds to what somebody else adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.benchmarks.interleave import Interval, Seconds, added_ratio, beyond, step_ratio
from tests.benchmarks.workloads import Workload


@dataclass(frozen=True)
class Target:
    """One target on one workload; `reached` where the measured ratio is at most `limit`.

    `clear`: the 95 % interval lies wholly on one side of the limit.
    """

    workload: str
    what: str
    limit: float
    ratio: Interval

    @property
    def reached(self) -> bool:
        return self.ratio.value <= self.limit

    @property
    def clear(self) -> bool:
        return self.ratio.high <= self.limit or self.ratio.low > self.limit


@dataclass(frozen=True)
class _Goal:
    what: str
    limit: float
    above: str
    below: str
    sizes: tuple[bool, ...]  # Workload.large of the workloads it is meant for
    above_baseline: str = "bare"


ANY = (True, False)

_GOALS = (
    _Goal("gradwatch ÷ floor", 1.35, "gradwatch", "floor", (True,)),
    _Goal("gradwatch ÷ clip_grad_norm_", 0.4, "gradwatch", "clip_grad_norm", (False,)),
    _Goal("gradwatch ÷ get_total_norm", 1.0, "gradwatch", "get_total_norm", ANY),
    _Goal(
        "gradwatch clips, bound not reached ÷ clip_grad_norm_", 0.6, "gradwatch-clip", "clip_grad_norm", ANY
    ),
    _Goal(
        "gradwatch clips, bound exceeded ÷ clip_grad_norm_",
        1.0,
        "gradwatch-clip-bites",
        "clip_grad_norm",
        ANY,
    ),
    # The loop's own clip is not gradwatch's cost: compared with the loop that clips and is not watched.
    _Goal(
        "what gradwatch adds to a clipping loop ÷ floor",
        2.3,
        "gradwatch-user-clip",
        "floor",
        (True,),
        "clip_grad_norm",
    ),
)


def targets(workload: Workload, seconds: Mapping[str, Seconds]) -> list[Target]:
    """The targets that apply to a workload, of those whose contenders were measured."""
    return [
        Target(
            workload.name,
            goal.what,
            goal.limit,
            added_ratio(seconds, goal.above, goal.below, above_baseline=goal.above_baseline),
        )
        for goal in _GOALS
        if workload.large in goal.sizes and {goal.above, goal.below, goal.above_baseline} <= seconds.keys()
    ]


_CLIPPING = "whole step, watched, judged and clipped ÷ the step that calls clip_grad_norm_"
_LIGHT = frozenset({"tiny", "embedding"})
"""Workloads whose clip costs much of their step: there gradwatch is to win by more."""


def step_targets(workload: Workload, seconds: Mapping[str, Seconds], step_ms: float) -> list[Target]:
    """The targets on whole steps, of handovers timed and a bare step of `step_ms`."""
    limit = 0.93 if workload.name in _LIGHT else 1.0
    return [
        Target(
            workload.name,
            f"{_CLIPPING}{bound}",
            limit,
            step_ratio(seconds, contender, "clip_grad_norm", step_ms),
        )
        for contender, bound in (
            ("gradwatch-clip", ", bound not reached"),
            ("gradwatch-clip-bites", ", bound exceeded"),
        )
        if {contender, "clip_grad_norm", "bare"} <= seconds.keys()
    ]


_IN_BACKWARD = "`at: backward`, nothing clipped, µs a parameter beyond "
_OBSERVERS = {
    "the plain watch": ("gradwatch",),
    "the watch and bare tensor hooks that read the norm": ("gradwatch", "norm-hooks"),
    "the watch that observes by tensor hooks": ("gradwatch-local",),
}
ROOM = 2.0
"""µs a parameter that a bound in the backward may cost beyond observing it."""


def parameter_targets(workload: Workload, seconds: Mapping[str, Seconds]) -> list[Target]:
    """What acting inside the backward costs beyond observing, by parameter, where nothing has to be clipped."""
    above, found = "gradwatch-backward", []
    for said, observers in _OBSERVERS.items():
        if {above, "bare", *observers} <= seconds.keys():
            more = beyond(seconds, above, observers)
            each = Interval(*(value / workload.parameters for value in more))
            found.append(Target(workload.name, _IN_BACKWARD + said, ROOM, each))
    return found
