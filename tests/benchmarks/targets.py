"""The speed gradwatch is meant to reach, each as a ratio of what it adds to what somebody else adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.benchmarks.interleave import Interval, Seconds, added_ratio
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


_GOALS = (
    _Goal("gradwatch ÷ floor", 1.35, "gradwatch", "floor", (True,)),
    _Goal("gradwatch ÷ clip_grad_norm_", 0.4, "gradwatch", "clip_grad_norm", (False,)),
    _Goal("gradwatch ÷ get_total_norm", 1.0, "gradwatch", "get_total_norm", (True, False)),
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
