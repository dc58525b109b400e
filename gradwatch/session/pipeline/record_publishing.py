"""The Record of a step, made once it is known what was really done, and given to the sinks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from gradwatch.account.session_counts import SessionCounts
from gradwatch.actions.exit_status import end_with_status
from gradwatch.actions.step_actions import Outcome
from gradwatch.engine.actions.failed_actions import failed
from gradwatch.engine.actions.norms_after_actions import reshaped
from gradwatch.engine.judged_steps.staggered_judging import NONE_IN_TURN, InTurn
from gradwatch.records.decision import Decision
from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.session.binding.optimizer_rules import Clock, OptimizerRules
from gradwatch.sinks.circuit_breaker import Breaker

STOP_SECONDS = 2.0


class Facts(NamedTuple):
    """Values that the Record of a judged step is made of.

    `bound_rules` are the rules it was judged by, `found` is the Snapshot measured, `snapshot` as decided;
    `judged` False: the engine failed. `in_turn` are the staggered series that it judged.
    """

    bound_rules: OptimizerRules
    found: Snapshot
    snapshot: Snapshot
    verdict: Verdict
    decision: Decision
    clock: Clock
    findings: tuple[Finding, ...]
    judged: bool
    in_turn: InTurn = NONE_IN_TURN


class Judged(NamedTuple):
    """A step that is decided, for this rank's own parameters; `facts` is None where it leaves no Record."""

    decision: Decision
    facts: Facts | None = None


class Publishing:
    """The sinks of one session, and its totals."""

    def __init__(self) -> None:
        self.sinks: list[Breaker] = []
        self.totals = SessionCounts()

    def give(self, judged: Judged, outcome: Outcome | None) -> None:
        """Publish the Record of a step; `outcome` is what was done of it, None = as decided."""
        facts = judged.facts
        if facts is None:
            return
        bound_rules, found, verdict, decision = facts.bound_rules, facts.found, facts.verdict, facts.decision
        wrong = outcome if outcome is not None and outcome.error is not None else None
        done = decision if wrong is None else wrong.done
        health = bound_rules.health_tracker.after(found, verdict, done, judged=facts.judged)
        record = Record(facts.snapshot, verdict, decision, *facts.clock, health, facts.findings)
        if wrong is not None and wrong.error is not None:
            rules = tuple(one.rule for one in bound_rules.bound.plan.rules)
            left = reshaped(found, done, found.total_norm_applied, {})
            record = failed(record, left, done, wrong.error, rules)
        bound_rules.keep_record(record)
        self._publish(record, facts.in_turn)

    def give_all(self, records: Sequence[Record], in_turn: Sequence[InTurn]) -> None:
        """Publish Records of steps on which no rule changed, with the staggered series in turn at each."""
        self.totals.observe_all(records, in_turn)
        passing: BaseException | None = None
        for sink in self.sinks:
            try:
                sink.write_all(records)
            except (
                BaseException
            ) as error:  # no fault of the sink's; the others miss none of so many steps for it
                passing = error if passing is None else passing
        if passing is not None:
            raise passing

    def flush(self) -> None:
        """Make what was written durable, before training is stopped: 2 s in all, or longer where a sink may take it."""
        began = time.monotonic()
        for sink in self.sinks:
            spent = time.monotonic() - began
            sink.flush(max(0.0, STOP_SECONDS - spent, sink.stop_seconds - spent))

    def _publish(self, record: Record, in_turn: InTurn) -> None:
        self.totals.observe(record, in_turn)
        for sink in self.sinks:
            sink.write(record)
        if record.decision.stop:
            self.flush()
            end_with_status()
