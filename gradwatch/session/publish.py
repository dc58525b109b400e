"""When the Record of a step goes to the sinks: at once, or, where it acts, once it is known what was really done."""

from __future__ import annotations

import time
from dataclasses import replace

from gradwatch.account.running import RunningTotals
from gradwatch.engine.failures import failed
from gradwatch.engine.outcome import reshaped
from gradwatch.records.snapshot import Decision, Record, Snapshot
from gradwatch.runtime.exit_status import end_with_status
from gradwatch.session.binding.optimizer_rules import Course, Held
from gradwatch.sinks.breaker import Breaker


class Publishing:
    """The sinks of one Watch, and what each of its lanes has for them."""

    def __init__(self) -> None:
        self.sinks: list[Breaker] = []
        self.totals = RunningTotals()

    def give(self, course: Course, record: Record, plain: Snapshot, at_hand: bool) -> None:
        """Publish a Record; `at_hand`: its actions are about to be carried out, and `acted` will publish it.

        `plain` is what was measured, without what is decided.
        """
        course.record = record
        if at_hand and record.decision.acts:
            course.held = Held(record, plain)
        else:
            self._publish(record)

    def acted(self, course: Course, done: Decision, error: Exception | None) -> None:
        """What was decided is done; or `done` was done instead, because of `error`."""
        held = course.held
        if held is not None and error is not None:
            rules = tuple(one.rule for one in course.bound.plan.rules)
            left = reshaped(held.plain, done, held.plain.total_norm_applied, {})
            record = failed(held.record, left, done, error, rules)
            health = course.vitals.after(held.plain, record.verdict, done)
            course.record = record = replace(record, checkpoint=health)
            course.held = Held(record, held.plain)
        self.release(course)

    def release(self, course: Course) -> None:
        """Publish the Record that waits, if one does: a boundary that failed may have left it."""
        held, course.held = course.held, None
        if held is not None:
            self._publish(held.record)

    def flush(self, timeout: float = 2.0) -> None:
        """Make what was written durable, before training is stopped."""
        deadline = time.monotonic() + timeout
        for sink in self.sinks:
            sink.flush(max(0.0, deadline - time.monotonic()))

    def _publish(self, record: Record) -> None:
        self.totals.observe(record)
        for sink in self.sinks:
            sink.write(record)
        if record.decision.stop:
            self.flush()
            end_with_status()
