"""Outcome of rules on a recorded run: Events, actions, and on what each rule was judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradwatch.backtest.rule_coverage import RuleCoverage
from gradwatch.journal.audit import Line
from gradwatch.records.decision import Decision
from gradwatch.records.event import Event
from gradwatch.records.record import Record


@dataclass(frozen=True, slots=True)
class PlacedEvent:
    """An Event of one process (attempt) of a run, and the time of its step, in seconds since the epoch."""

    process: int
    event: Event
    wall_time: float


@dataclass(frozen=True, slots=True)
class RulesOutcome:
    """Outcome of some rules on a run: their Events, and what they would have had done at the steps as recorded.

    `actions` are counted by rule; `skipped` are the steps that would have been skipped, and `stop` is the first step
    at which the training would have been stopped, with its process. `unknown` counts steps at which the norms hold
    what gradwatch itself did in the run, so that nothing is said of what these rules would have made of them; nor is it
    of the policies `on_elements` of `clip:`, since no element is recorded.
    """

    events: tuple[PlacedEvent, ...] = ()
    actions: tuple[Line, ...] = ()
    skipped: int = 0
    stop: tuple[int, int] | None = None
    unknown: int = 0
    coverage: tuple[RuleCoverage, ...] = ()
    on_elements: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunBacktest:
    """One run judged by rules, compared with other rules, or (`against` None) with what fired in the run.

    It is judged as `rank` recorded it, of all the `ranks` that have a journal.
    """

    run: str
    folder: str
    rank: int
    ranks: Sequence[int]
    steps: int
    outcome: RulesOutcome
    against: RulesOutcome | None
    live: RulesOutcome
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> RulesOutcome:
        """The other side of the comparison."""
        return self.live if self.against is None else self.against


@dataclass(slots=True)
class OutcomeTotals:
    """Running totals of Events and actions."""

    events: list[PlacedEvent] = field(default_factory=list)
    lines: dict[tuple[str, str, bool], Line] = field(default_factory=dict)
    skipped: int = 0
    stop: tuple[int, int] | None = None
    unknown: int = 0

    def take(self, process: int, record: Record, events: Sequence[Event], decision: Decision) -> None:
        """Add what fired and was decided at one step."""
        step = record.snapshot.step
        self.events += [PlacedEvent(process, event, record.wall_time) for event in events]
        self.skipped += decision.skip
        if decision.stop and self.stop is None:
            self.stop = process, step
        for order in decision.orders:
            key = order.rule, order.action, order.shadow
            self.lines.setdefault(key, Line(*key)).add(step, order)

    def count_unknown(self) -> None:
        """Count a step whose norms do not say what the actions would have made of them."""
        self.unknown += 1

    def outcome(self, coverage: Sequence[RuleCoverage] = (), on_elements: Sequence[str] = ()) -> RulesOutcome:
        """All of it, Events by process and time: a journal has the steps of each optimizer together."""
        events = sorted(self.events, key=lambda one: (one.process, one.wall_time))
        lines = sorted(
            self.lines.values(), key=lambda line: (line.shadow, -line.times, line.rule, line.action)
        )
        return RulesOutcome(
            tuple(events),
            tuple(lines),
            self.skipped,
            self.stop,
            self.unknown,
            tuple(coverage),
            tuple(on_elements),
        )
