"""Running totals of one watch, added up as its Records are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from gradwatch.account.account import Watched
from gradwatch.account.never_judged import NeverJudged
from gradwatch.account.rules_without_data import RulesWithoutData
from gradwatch.records.columns import OBSERVED_ONLY
from gradwatch.records.record import Record
from gradwatch.records.verdict import UNJUDGED
from gradwatch.runtime.overhead_timer import OverheadTimer

MOST_REASONS = 64
"""Reasons for which baselines began anew that are counted apart; a script may give one of its own each time."""
OTHER_REASONS = "other reasons"
ATTACHING = 2
"""Records after which what attaching took has been counted: rules are bound as the first is judged."""


class SessionCounts:
    """Counts over all optimizers of one watch; a step adds about half a microsecond.

    `rebaselined` are the reasons for which baselines began anew; `without_data` are the rules that have had no data so
    far; `own_time` is what the watch measures its cost by. `unowned` are windows of loops without an optimizer.
    """

    def __init__(self) -> None:
        self.own_time = OverheadTimer()
        self._attach_seconds = 0.0
        self.records = self.rejected = self.provisional = self.unjudged = self.unowned = 0
        self.cleared = self.cleared_nonfinite = self.cleared_moved = self.cleared_last = 0
        self.nonfinite_unjudged = 0
        self.measured = 0  # steps and windows, each of which becomes a Record
        self.coverage = 1.0
        self.stopped = False
        self.fired: dict[str, int] = {}
        self.actions: dict[str, int] = {}
        self.rebaselined: dict[str, int] = {}
        self.replaced_unfit: dict[str, int] = {}
        self.without_data = RulesWithoutData()
        self.never_judged = NeverJudged()
        self.without_histogram = 0  # steps whose loss scale is no power of two

    def count_attaching(self, seconds: float) -> None:
        """Count the time that it took to attach to models and optimizers."""
        self._attach_seconds += seconds

    def count_measured(self) -> None:
        """Count a step or window that was measured, before it is judged."""
        self.measured += 1
        self.cleared_last = 0

    def count_without_histogram(self) -> None:
        """Count a step whose histograms were read under a loss scale that is no power of two."""
        self.without_histogram += 1

    def count_cleared(self, nonfinite: bool, moved: bool) -> None:
        """Count gradients that are gone, with no step taken by them.

        `nonfinite`: some were NaN or Inf; `moved`: the weights were written to since the last step that was seen.
        """
        self.cleared += 1
        self.cleared_nonfinite += nonfinite
        self.cleared_moved += moved
        self.cleared_last += 1

    def begun_anew(self, reason: str) -> None:
        """Count that baselines began anew."""
        known = reason in self.rebaselined or len(self.rebaselined) < MOST_REASONS
        reason = reason if known else OTHER_REASONS
        self.rebaselined[reason] = self.rebaselined.get(reason, 0) + 1

    def replaced_unfit_weights(self, reasons: str) -> None:
        """Count weights that were not healthy, for these reasons, when those of another optimizer replaced them."""
        known = reasons in self.replaced_unfit or len(self.replaced_unfit) < MOST_REASONS
        reasons = reasons if known else OTHER_REASONS
        self.replaced_unfit[reasons] = self.replaced_unfit.get(reasons, 0) + 1

    def observe(self, record: Record, in_turn: Mapping[str, Any]) -> None:
        """Add one published Record; `in_turn` are the staggered series in turn at its step."""
        snapshot = record.snapshot
        self.records += 1
        self.provisional += snapshot.provisional
        self.coverage = snapshot.coverage
        if snapshot.scalars.get("scaler_skip"):
            self.rejected += 1
        if OBSERVED_ONLY in snapshot.scalars:
            self.unowned += 1
        self.without_data.observe(snapshot, in_turn)
        if in_turn:
            self.never_judged.observe(snapshot, in_turn)
        if self.records == ATTACHING:
            self.own_time.restart()
        if record.verdict is UNJUDGED:
            self.unjudged += 1
        elif not isfinite(snapshot.total_norm + snapshot.total_norm_applied):
            self._nonfinite(record)
        if record.verdict.events or record.decision.orders:
            self._judged(record)

    def observe_all(self, records: Sequence[Record], in_turn: Sequence[Mapping[str, Any]]) -> None:
        """Add several Records of one optimizer without events, and that no GradScaler rejected."""
        if self.records < ATTACHING or OBSERVED_ONLY in records[0].snapshot.scalars:
            for record, turn in zip(records, in_turn, strict=True):
                self.observe(record, turn)
            return
        self.records += len(records)
        self.coverage = records[-1].snapshot.coverage
        self.without_data.observe_all([record.snapshot for record in records], in_turn)
        for record, turn in zip(records, in_turn, strict=True):
            if turn:
                self.never_judged.observe(record.snapshot, turn)
            if record.decision.orders:
                self._judged(record)
            if not isfinite(record.snapshot.total_norm + record.snapshot.total_norm_applied):
                self._nonfinite(record)

    @property
    def judged(self) -> int:
        """Records that every rule could judge."""
        return self.records - self.provisional - self.unjudged

    def watched(
        self,
        steps: int,
        backwards: int,
        optimizers: int,
        parameters: int,
        replaced: int = 0,
        waiting: int = 0,
        uncalled: int = 0,
    ) -> Watched:
        """The totals of now; several Records may belong to one of the `steps`.

        `uncalled` are rejected steps for which no optimizer was called; the other ones in Records are steps.

        What was measured, and is not `waiting` to be judged, has a Record unless an error ended its judging: one of
        gradwatch, or of the script.
        """
        own_seconds, seconds = self.own_time.share()
        without_record = max(0, self.measured - waiting - self.records)
        return Watched(
            steps=steps,
            backwards=backwards,
            rejected=uncalled,
            rejected_inside=max(0, self.rejected - uncalled),
            cleared=self.cleared,
            cleared_nonfinite=self.cleared_nonfinite,
            cleared_moved=self.cleared_moved,
            cleared_last=self.cleared_last,
            provisional=self.provisional,
            unjudged=self.unjudged + without_record,
            nonfinite_unjudged=self.nonfinite_unjudged,
            unowned=self.unowned,
            replaced=replaced,
            without_histogram=self.without_histogram,
            optimizers=optimizers,
            parameters=parameters,
            coverage=self.coverage,
            own_seconds=own_seconds,
            attach_seconds=self._attach_seconds + self.own_time.before,
            seconds=seconds,
        )

    def _nonfinite(self, record: Record) -> None:
        """Count NaN and Inf that no rule breaches on and that get to the optimizer: a file may have no such rule."""
        snapshot = record.snapshot
        kept_from_it = record.decision.skip or snapshot.scalars.get("scaler_skip")
        known = not isfinite(snapshot.total_norm) or snapshot.applied_known
        if known and not (record.verdict.breaching or kept_from_it):
            self.nonfinite_unjudged += 1

    def _judged(self, record: Record) -> None:
        for event in record.verdict.events:
            if event.kind == "firing":
                self.fired[event.rule] = self.fired.get(event.rule, 0) + 1
        self.stopped |= record.decision.stop
        done = {order.action for order in record.decision.orders if not order.shadow}
        for action in done:
            self.actions[action] = self.actions.get(action, 0) + 1
