"""The faults that `gradwatch selftest` injects, the plan that the script's process is given, its results. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwatch.session.settings import IN_SELFTEST

VARIABLE = IN_SELFTEST
"""Environment: the plan as JSON, see `Plan`."""
RESULTS = "selftest-rank{}.json"
OWN_WATCH = (
    "the script has a gradwatch.watch of its own, so its optimizers are judged by the rules given there: "
    "take it out, gradwatch run watches without it"
)
NO_OPTIMIZER = "no optimizer took a step, and a loop without one cannot be tested"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of FAULTS: gradients are multiplied by `factor`, or one of their elements becomes `element`.

    It begins after `warmup` steps at the earliest and lasts `steps` steps, less where a rule fires. `everywhere`: in
    all parameters, else in one; `gradual`: `steps` grow with the plan's warm-up; `rank`: in this rank alone.
    """

    name: str
    title: str
    warmup: int
    steps: int
    factor: float = 1.0
    element: float | None = None
    everywhere: bool = False
    gradual: bool = False
    rank: int | None = None

    def lasts(self, warmup: float) -> float:
        """The most steps that it lasts under a plan with this warm-up."""
        return self.steps * (warmup if self.gradual else 1)


FAULTS = (
    Fault("nan", "a NaN in a gradient", 5, 1, element=math.nan),
    Fault("inf", "an Inf in a gradient", 5, 1, element=math.inf),
    Fault("spike", "all gradients × 10,000", 55, 3, factor=1e4, everywhere=True),
    Fault("vanishing", "a layer's gradient × 1e-9", 110, 100, factor=1e-9, gradual=True),
    Fault("freeze", "a layer's gradient × 0", 110, 100, factor=0.0, gradual=True),
    Fault(
        "rank",
        "the gradients of rank 1 × 1,000",
        60,
        60,
        factor=1e3,
        everywhere=True,
        gradual=True,
        rank=1,
    ),
)
"""In this order: those that need no baseline first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`faults` are names of FAULTS, `directory` where results go, `seconds` the time for all steps, from the first on.

    `warmup` multiplies the steps before a fault and the steps of it: for rule files with longer baselines.
    """

    directory: str
    faults: Sequence[str] = tuple(fault.name for fault in FAULTS)
    seconds: float = 60.0
    warmup: float = 1.0


@dataclass(slots=True)
class Result:
    """One fault: the step at which it began, the parameter ("" = all), and what it caused.

    `lasted` counts its steps, `late` those before a rule fired (None = none did), `rejected` those that a GradScaler
    rejected, `entered` the gradients that it was put into in this process. `fired` and `actions` are counts of rules
    and actions since it began, `scraped` the rules whose counter in /metrics went up; None: this process serves none.
    `ended`: it is over; else the process ended meanwhile.
    """

    fault: str
    step: int
    parameter: str = ""
    lasted: int = 0
    late: int | None = None
    rejected: int = 0
    entered: int = 0
    fired: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    scraped: list[str] | None = None
    ended: bool = False

    def go_on(self, fired: dict[str, int], actions: dict[str, int], entered: int, rejected: bool) -> None:
        """Note one more step, and what all of them have caused so far."""
        self.fired, self.actions, self.entered = fired, actions, entered
        self.rejected += rejected
        if fired and self.late is None:
            self.late = self.lasted
        self.lasted += 1

    def end(self, scraped: list[str] | None) -> None:
        """Note that it is over, and what /metrics shows of it."""
        self.scraped, self.ended = scraped, True


@dataclass(slots=True)
class Document:
    """Everything that one process of the script reports of its faults; written as JSON, read by `of`.

    `steps` of the optimizers followed one after another, `most_steps` of one of them; `rejected` steps while no fault
    was active. `why`: nothing can be injected here, for this reason; `broke`: the injection itself failed, by this
    error. `time_up`: the plan's seconds are over.
    """

    steps: int = 0
    most_steps: int = 0
    rejected: int = 0
    world_size: int = 1
    why: str = ""
    broke: str = ""
    time_up: bool = False
    results: list[Result] = field(default_factory=list)

    @classmethod
    def of(cls, read: dict[str, Any]) -> Document:
        """The document that was written as this JSON. Raises TypeError for another one."""
        return cls(**{**read, "results": [Result(**one) for one in read["results"]]})
