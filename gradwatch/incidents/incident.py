"""An incident as a whole: what fired, what the cause was, what was done about it, the steps that led there.

Made from a Record while it happens (for a bundle) and from a journal afterwards (`gradwatch explain`): one noun, one
page (`gradwatch.incidents.incident_page`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwatch.incidents.explanation import sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.records.decision import Decision, Order
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.runtime.json_numbers import json_ready

AROUND = 8
"""Steps before an incident whose norms are shown with it."""


@dataclass(frozen=True, slots=True)
class StepNorms:
    """The norms of one step: L2 over all parameters, before and after all clipping. `loss` None = not known."""

    step: int
    total_norm: float
    total_norm_applied: float
    loss: float | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident. `name` is the id that log and journal give it; `step` counts optimizer steps from 0.

    `event` is the transition that began it, `finding` its cause (None = not looked for, or not found), `done`
    what was ordered for the step, by any rule, `around` the norms of the steps up to it and, in a journal, after it.
    `versions` are those of the libraries, `script` is what was run.
    """

    name: str
    step: int
    optimizer: int = 0
    rank: int = 0
    world_size: int = 1
    run_id: str = ""
    script: str = ""
    wall_time: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    event: Event | None = None
    finding: Finding | None = None
    done: tuple[Order, ...] = ()
    around: tuple[StepNorms, ...] = ()

    @property
    def title(self) -> str:
        """The incident in one sentence."""
        if self.finding is not None and (self.finding.found or self.event is None):
            return sentence(self.finding)
        return "" if self.event is None else self.event.summary

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, with the cause and the suggested fix in words beside the fields."""
        document: dict[str, Any] = json_ready(asdict(self))
        finding = self.finding
        suggestion = None if finding is None else suggestion_for(finding)
        document["where"] = "" if finding is None else finding.where
        document["cause"] = "" if finding is None else sentence(finding)
        document["suggestion"] = (
            None
            if suggestion is None
            else {"id": suggestion.id, "why": suggestion.why, "fix": suggestion.fix}
        )
        return document


def ordered(decision: Decision) -> tuple[Order, ...]:
    """The orders of a Decision in an order of their own: it holds a set."""
    return tuple(
        sorted(decision.orders, key=lambda order: (order.shadow, order.rule, order.action, order.site))
    )
