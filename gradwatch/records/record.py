"""One step as every sink sees it, and the health of a checkpoint saved after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwatch.records.decision import Decision
from gradwatch.records.finding import Finding
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict


@dataclass(frozen=True, slots=True)
class CheckpointHealth:
    """Health of a checkpoint saved after this step (`gradwatch.checkpoint` says when it is).

    `last_healthy_step` None = there was none; `reasons` say why not, for people, empty where it is healthy.
    `weights_step`: the last step after which the weights themselves were looked at and found fit, None = not yet. When
    that is done goes by the clock, so it is no part of what makes two of these equal. `replaced`: why weights that
    others have replaced in the meantime were not healthy when they were last seen.
    """

    healthy: bool = True
    last_healthy_step: int | None = None
    reasons: tuple[str, ...] = ()
    weights_step: int | None = field(default=None, compare=False, repr=False)
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One step as every sink sees it.

    `overhead_seconds` is what gradwatch itself cost since the last Record; `step_seconds` the time since the
    last `optimizer.step()` (None on the first); `wall_time` seconds since the epoch. `checkpoint` is None in what a
    journal restores. `findings` say what made the gradients of an incident non-finite, where a rule had it looked
    for.
    """

    snapshot: Snapshot
    verdict: Verdict
    decision: Decision
    overhead_seconds: float
    step_seconds: float | None
    wall_time: float
    checkpoint: CheckpointHealth | None = None
    findings: tuple[Finding, ...] = ()
