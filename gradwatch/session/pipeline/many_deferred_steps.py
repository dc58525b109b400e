"""Steps of one optimizer that waited, judged and published in one call as far as all of them are as usual.

What `StepPipeline.judge` does for each step is done here once for many, and gives the same Records. A step that could
need anything else (an event, an action of a rule, a second look, other ranks) is left to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from gradwatch.capture.columns.nonfinite_running_statistics import RunningStatistics
from gradwatch.capture.read_after_backward import Capture
from gradwatch.capture.snapshot_assembly import assemble_many
from gradwatch.distributed.rank_membership import Exchange
from gradwatch.distributed.ranks import Ranks
from gradwatch.distributed.step_seen_by_all_ranks import Shared
from gradwatch.engine.actions.norms_after_actions import reshaped, with_clip_order
from gradwatch.engine.bound_engine import UNCLIPPED, BlockVerdict
from gradwatch.errors import TrainingStopped
from gradwatch.records.decision import Decision
from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Snapshot
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.optimizer_rules import OptimizerRules
from gradwatch.session.checkpoint_health import Checkpoints
from gradwatch.session.logged_once import Notices
from gradwatch.session.optimizer_context import OptimizerContext
from gradwatch.session.pipeline.extra_columns import Measurement
from gradwatch.session.pipeline.record_publishing import Publishing

FEWEST = 2
"""Steps that are worth it: one alone is judged at a glance."""


class OrdinarySteps:
    """Judges the first of the steps that wait, as many as are surely as usual.

    `recorded()` gives causes that the localiser has found, of steps that were taken before.
    """

    def __init__(
        self,
        capture: Capture,
        checkpoints: Checkpoints,
        notices: Notices,
        publishing: Publishing,
        activity: Activity,
        statistics: RunningStatistics,
        ranks: Ranks,
        recorded: Callable[[], tuple[Finding, ...]],
    ) -> None:
        self._capture = capture
        self._checkpoints = checkpoints
        self._notices = notices
        self._publishing = publishing
        self._activity = activity
        self._statistics = statistics
        self._ranks = ranks
        self._recorded = recorded

    def conclude(self, ctx: OptimizerContext, waiting: deque[Measurement]) -> bool:
        """Take the first of these off, judge and publish them; False, and nothing is done, if even two cannot be so."""
        first = waiting[0]
        bound_rules = first.bound_rules
        if len(waiting) < FEWEST or not _nothing_else_asked(ctx, bound_rules) or self._statistics.ruined:
            return False
        if bound_rules.block_retry_in:
            bound_rules.judged_alone()
            return False
        measured, judged, before = self._alike(ctx, waiting), None, bound_rules.state
        if len(measured) >= FEWEST:
            values = [one.values() for one in measured]
            snapshots = assemble_many(
                bound_rules.sites, first.captured.index, measured, values, self._capture.coverage.ratio
            )
            anew = [t for t, one in enumerate(measured) if one.begins_anew]
            judged = bound_rules.bound.evaluate_many(before, snapshots.snapshots, snapshots.norm, anew)
        if judged is None or len(judged.in_turn) < FEWEST:
            bound_rules.tried_together_in_vain()
            return False
        count = len(judged.in_turn)
        bound = bound_rules.bound
        otherwise, clips_from = bound.decision_otherwise, bound.clips_from
        left = [
            _clipped(snapshot, otherwise if snapshot.step >= clips_from else UNCLIPPED)
            for snapshot in snapshots.snapshots[:count]
        ]
        if bound_rules.state is not before or not waiting or waiting[0] is not first:
            return True  # judged meanwhile, by a signal handler that saves the state
        # From here on they are taken: what fails costs their Records, and is no reason to judge them again.
        bound_rules.take_state(judged.state)
        for _ in left:
            waiting.popleft()
        try:
            self._take(bound_rules, measured[:count], left, judged)
        except TrainingStopped:  # by a sink: every other one has these steps already
            raise
        except Exception:
            bound_rules.health_tracker.unjudged(left[-1][0].step)
            raise
        return True

    def _alike(self, ctx: OptimizerContext, waiting: deque[Measurement]) -> list[Measurement]:
        """The first of these that were measured alike: by the same rules, with all gradients, no more than columns."""
        found: list[Measurement] = []
        first = waiting[0]
        bound_rules, kinds = first.bound_rules, first.bound_rules.sites.kinds
        count = len(kinds) - kinds.count("rank")
        for one in waiting:
            window, extras = one.window, one.extras
            if (
                not one.usual
                or one.bound_rules is not bound_rules
                or len(window.sites) != count
                or window.provisional
                or window.empty
                or not window.applied_known
                or window.loss_scale is not None
                or window.skipped is not None
                or extras.modules
                or extras.histograms is not None
                or extras.module_histograms is not None
                or not window.calls.all()
                or (one.exchange is not None and not self._learned(ctx, one, one.exchange))
            ):
                break
            found.append(one)
        return found

    def _learned(self, ctx: OptimizerContext, one: Measurement, exchange: Exchange) -> bool:
        """True if all ranks have sent what was to be known of them at a step, which is kept then."""
        mine = slice(0, len(one.window.sites))
        shared = Shared(one.window, one.extras, one.values(), mine, may_act=True)
        learned = self._ranks.learned(ctx.membership, shared, exchange)
        if learned is None:
            return False
        one.knows_ranks(learned.extras, learned.values)
        return True

    def _take(
        self,
        bound_rules: OptimizerRules,
        measured: Sequence[Measurement],
        left: Sequence[tuple[Snapshot, Decision]],
        judged: BlockVerdict,
    ) -> None:
        """Keep what these steps have taught, and publish them; `left` is how each of them leaves its gradients."""
        captured, verdicts = bound_rules.captured, judged.verdicts[: len(left)]
        self._notices.unmeasured(self._capture.coverage.missing)
        self._checkpoints.check_if_due(bound_rules)
        for snapshot, _ in left:
            captured.know_total(snapshot.total_norm, ordinary=True)
        health = bound_rules.health_tracker.after_all([snapshot for snapshot, _ in left], verdicts[0])
        records = [
            Record(snapshot, verdict, decision, *one.clock, now)
            for one, (snapshot, decision), verdict, now in zip(measured, left, verdicts, health, strict=True)
        ]
        if findings := self._recorded():
            records[-1] = replace(records[-1], findings=findings)
        bound_rules.judged_together(len(left), records[-1])
        self._publishing.give_all(records, judged.in_turn)
        self._activity.judged()


def _clipped(snapshot: Snapshot, decision: Decision) -> tuple[Snapshot, Decision]:
    """The step as a bound on the total norm leaves it, with the word for that."""
    if not decision.touches:
        return snapshot, decision
    left = reshaped(snapshot, decision, snapshot.total_norm_applied, {})
    return left, with_clip_order(decision, snapshot, left)


def _nothing_else_asked(ctx: OptimizerContext, bound_rules: OptimizerRules) -> bool:
    """True if rules, ranks and weights ask nothing of a step but what is as usual, and a bound on the total."""
    membership, decision = ctx.membership, bound_rules.bound.decision_otherwise
    return (
        not bound_rules.state.may_act
        and not decision.elementwise
        and not bound_rules.bound.clipping.policies
        and (membership is None or not membership.exchanges)
        and bound_rules.health_tracker.untroubled
    )
