"""The data of the live view: the last steps of a run, its rules and its parameters, at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Process = Literal["waiting", "running", "finished", "stopped", "failed", "killed", "unreachable"]
"""What is known of the process: "waiting" for its first step; "killed": it is gone, and left no account;
"unreachable": its /metrics cannot be read any more. The others are its account's words."""


@dataclass(frozen=True, slots=True)
class Firing:
    """A rule that is firing. `since` is the step at which it began (-1 = not known), `sites` the worst of `count`.

    `rank` is the one on which it fires where that is not the one shown, or is in another process of that.
    """

    rule: str
    severity: str
    since: int = -1
    sites: tuple[str, ...] = ()
    count: int = 0
    actions: tuple[str, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Happened:
    """A transition of a rule, or the cause of an incident (`kind` "cause", `text` its sentence)."""

    step: int
    kind: str
    rule: str
    severity: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerLine:
    """The last steps of one optimizer: scalars of the last one, and histories with the newest last.

    `steps_per_second` is 0 before the second step. Histories have NaN where a step had no such value.
    """

    optimizer: int
    step: int
    steps_per_second: float
    total_norm: float
    applied: float
    total_norms: Sequence[float]
    loss: float | None = None
    losses: Sequence[float] = ()
    lr: float | None = None
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class ParameterLine:
    """One parameter: its last norm, the median of those before it (NaN = too few), and its norms, the newest last.

    `firing` are the rules that are firing at it.
    """

    name: str
    norm: float
    usual: float
    norms: Sequence[float]
    firing: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The last norm as a multiple of the usual one; NaN where that is not known."""
        return self.norm / self.usual if self.usual > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class LiveView:
    """A run at one moment.

    `where` is its folder or URL. `quiet_seconds` is the time since the last step, None where the process does not run.
    `stalled`: it is longer than usual by far. `parameters` are those furthest from their usual norm, the furthest
    first, at `norms_step`. `weights_healthy` is what the health tag of all ranks says, None where that is not known,
    and `unfit` its first reason why they are not; `reservations` are reasons why a run that has ended is not
    called healthy. `fired` counts firings by rule; `worst` is the most severe rule that
    has fired and `worst_step` its first step. `reading`: steps are still being read that were recorded before.
    """

    where: str
    run_id: str = ""
    script: str = ""
    rank: int = 0
    world_size: int = 1
    process: Process = "waiting"
    started: float = 0.0
    steps: int = 0
    quiet_seconds: float | None = None
    stalled: bool = False
    optimizers: Sequence[OptimizerLine] = ()
    coverage: float | None = None
    own_share: float | None = None
    parameters: Sequence[ParameterLine] = ()
    norms_step: int = -1
    firing: Sequence[Firing] = ()
    fired: Mapping[str, int] = field(default_factory=dict)
    worst: str = ""
    worst_severity: str = ""
    worst_step: int = -1
    lately: Sequence[Happened] = ()
    actions: Mapping[str, int] = field(default_factory=dict)
    skipped: int = 0
    clipped: int = 0
    notes: Sequence[str] = ()
    reading: bool = False
    weights_healthy: bool | None = None
    unfit: str = ""
    reservations: Sequence[str] = ()

    @property
    def over(self) -> bool:
        """True if nothing more will come."""
        return self.process in ("finished", "stopped", "failed", "killed")
