"""What judging asks of the Watch it belongs to."""

from __future__ import annotations

from typing import Protocol

from gradwatch.capture.columns.running_statistics import RunningStatistics
from gradwatch.capture.optimizer import Lane
from gradwatch.capture.weights import Weights
from gradwatch.records.finding import Finding
from gradwatch.records.snapshot import Decision, Event, Record, Snapshot, Verdict
from gradwatch.runtime.health import Health


class Surroundings(Protocol):
    """Where faults are counted, costs known and the user told."""

    health: Health
    statistics: RunningStatistics
    weights: Weights

    def failed(self, component: str, error: BaseException) -> None:
        """Count a fault of ours."""

    def judged(self) -> None:
        """A step was judged without a fault."""

    def escalated(self, event: Event) -> bool:
        """A rung of a rule's ladder was reached: tell the user's callback; whether it wants training stopped."""

    def spent(self) -> float:
        """Seconds that watching has cost since the last Record."""

    def coverage_now(self) -> float:
        """The coverage as of this boundary, 0..1."""

    def remark(self, lane: Lane) -> None:
        """A few marks did not tell the truth about this lane: put every mark back."""

    def causes(
        self, lane: Lane, snapshot: Snapshot, verdict: Verdict, decision: Decision
    ) -> tuple[Finding, ...]:
        """What made the gradients of this step's incidents what they are, where a rule wants to know."""

    def kept(self, lane: Lane, record: Record) -> Record:
        """Have what this step was made of copied where a rule wants a bundle; the Record as it is followed."""
