"""The faults that `gradwatch selftest` injects, and the plan that the script's process is given. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "GRADWATCH_SELFTEST"
"""Environment: the plan as JSON, see `Plan`."""
RESULTS = "selftest-rank{}.json"


@dataclass(frozen=True, slots=True)
class Fault:
    """`name` of FAULTS; injected after `warmup` steps at the earliest, at `steps` steps at most, until a rule fires."""

    name: str
    warmup: int
    steps: int


FAULTS = (
    Fault("nan", 5, 1),
    Fault("inf", 5, 1),
    Fault("spike", 55, 3),
    Fault("vanishing", 110, 100),
    Fault("freeze", 110, 100),
    Fault("rank", 60, 60),
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
