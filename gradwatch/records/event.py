"""A transition of one rule, as sinks are given it: pending, firing, resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The mildest first."""
EventKind = Literal["pending", "firing", "resolved", "repeat", "escalated", "failed", "rebaselined"]


@dataclass(frozen=True, slots=True)
class Event:
    """A transition of one rule: pending, firing, resolved; `repeat` = acted again while already firing;
    `escalated` = a rung of its ladder was reached; `failed` = its action could not be carried out. `rebaselined` is of
    no rule (""): the baselines of some began anew before this step; `summary` is the reason, `description` the rules.

    One per rule and transition, however many sites are involved: `sites` names the worst five (largest score
    first), `count` says how many there are, `first_cause` is the first of them in backward order (the
    deepest); of a rule with `when:` they are those of the rules it joins that fire at this step, and `value` counts the
    rules that hold. Else `value` and `score` belong to `sites[0]`; `threshold` is what `score` was compared with, and
    `yardstick` the kind of detector that did so where the rule has two ("" = it has one).
    `incident` identifies the firing period (same id from firing to resolved, also over a re-fire within
    `cooldown`); `notify` is False where that re-fire must not alert again, and where it is `inhibited`: part of the
    incident of another rule, which reports it.
    """

    kind: EventKind
    rule: str
    detector: str
    severity: Severity
    optimizer: int
    step: int
    incident: str
    sites: tuple[str, ...] = ()
    count: int = 0
    first_cause: str = ""
    value: float = 0.0
    score: float = 0.0
    threshold: float = 0.0
    actions: tuple[str, ...] = ()
    notify: bool = True
    summary: str = ""
    description: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    yardstick: str = ""
    inhibited: bool = False


def severity_rank(severity: str) -> int:
    """Place of a severity in an order with the most severe first (0); what is none of them comes last."""
    return len(SEVERITIES) - 1 - SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
