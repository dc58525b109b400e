"""One step of one optimizer: measured, shared with the ranks, judged, permitted, published."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradwatch.actions.step_actions import Outcome
from gradwatch.capture.columns.nonfinite_running_statistics import RunningStatistics
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.capture.snapshot_assembly import assemble, of_norms
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed.ranks import Ranks
from gradwatch.distributed.step_seen_by_all_ranks import Shared
from gradwatch.engine import Engine
from gradwatch.engine.engine_state import NONE_ACTIVE
from gradwatch.engine.judged_steps.staggered_judging import NONE_IN_TURN
from gradwatch.records.columns import UNOWNED
from gradwatch.records.decision import Decision
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import UNJUDGED, Verdict
from gradwatch.session.actions.causes_by_norms import causes_by_norms
from gradwatch.session.actions.localise_action import Causes, Usual
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.optimizer_rules import ORDINARY, OptimizerRules
from gradwatch.session.binding.rule_bindings import RuleBindings
from gradwatch.session.checkpoint_health import Checkpoints
from gradwatch.session.logged_once import Notices
from gradwatch.session.optimizer_context import OptimizerContext
from gradwatch.session.pipeline.decisions import Decisions
from gradwatch.session.pipeline.extra_columns import ExtraColumns, Measurement
from gradwatch.session.pipeline.many_deferred_steps import OrdinarySteps
from gradwatch.session.pipeline.norm_applied import NormApplied
from gradwatch.session.pipeline.record_publishing import Facts, Judged, Publishing
from gradwatch.session.pipeline.step_context import StepContext

if TYPE_CHECKING:
    from gradwatch.session.actions.snapshot_action import Bundles


@dataclass(slots=True, frozen=True)
class Sources:
    """Collaborators of the pipeline: what a step is judged by beside its own numbers, and the receivers of Records."""

    capture: Capture
    statistics: RunningStatistics
    checkpoints: Checkpoints
    causes: Causes | None
    bundles: Bundles | None
    notices: Notices
    on_escalate: Callable[[Event], object] | None


class StepPipeline:
    """Judges the steps of every optimizer by the rules bound to it, and publishes their Records.

    Everything is called from the step boundary, and calls down from there.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        activity: Activity,
        rule_bindings: RuleBindings,
        extra_columns: ExtraColumns,
        publishing: Publishing,
        sources: Sources,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._activity = activity
        self._rule_bindings = rule_bindings
        self._extra_columns = extra_columns
        self._publishing = publishing
        self._sources = sources
        self._decisions = Decisions(activity, sources.on_escalate)
        self._norm_applied = NormApplied(activity, clips=engine.ruleset.clip is not None)
        self._acts_on_jumps = engine.acts_by("jump")
        self._defers = deferral_allowed(engine, rule_bindings)
        self._ordinary_steps = OrdinarySteps(
            sources.capture,
            sources.checkpoints,
            sources.notices,
            publishing,
            activity,
            sources.statistics,
            ranks,
            tuple if sources.causes is None else sources.causes.recorded,
        )

    def needs_host(self, ctx: OptimizerContext) -> bool:
        """True if some rule acts on this very step, and no device can decide it alone."""
        # A device knows only its own rank's part of a pooled norm, and sends the other ranks nothing.
        return self._engine.acts_on_host or ctx.exchanges or ctx.owes_ranks or ctx.clips_at_step_instead

    @property
    def skips_nonfinite(self) -> bool:
        """True if some rule skips non-finite steps (a fused optimizer then gets `found_inf` on the device)."""
        return self._engine.skips_nonfinite

    def skips_nonfinite_at(self, step: int) -> bool:
        """True if some rule skips a step of this number if its gradients are not finite."""
        return self._engine.skips_nonfinite and step >= self._engine.skips_from

    def clips_again(self, ctx: OptimizerContext, norms: NDArray[np.float64]) -> Decision:
        """Clipping by `clip:` of gradients with these `norms[K]`, made after those that this step was judged by."""
        return self._decisions.clips_again(ctx, norms)

    # -- a step ------------------------------------------------------------------------------------------

    def measure(self, ctx: OptimizerContext, window: WindowNorms) -> Measurement:
        """Read everything about a window that must be read now."""
        bound_rules = ctx.bound_rules or ctx.rules
        if bound_rules.clipper is not None:
            bound_rules.clipper.collect_into(window)
            if bound_rules.clipper.disabled_reason and bound_rules.bound.asked:
                self._rule_bindings.move_to_step(ctx)
        if bound_rules.micro is not None:
            bound_rules.micro.collect_into(window)
        measurement = self._extra_columns.measure(ctx, bound_rules, window)
        if window.facts:
            measurement.scalars.update(window.facts)
            self._name_uncleared(measurement.captured)
        unowned = self._sources.capture.in_no_optimizer
        if unowned is not None and not (measurement.captured.index or measurement.captured.without_optimizer):
            measurement.scalars[UNOWNED] = float(unowned)
        if ctx.membership is not None and ctx.membership.cadences:
            extras, values = measurement.extras, measurement.values
            measurement.exchange_begun(self._ranks.begin(ctx.membership, window, extras, values))
        self._publishing.totals.count_measured()
        return measurement

    def _name_uncleared(self, captured: OptimizerCapture) -> None:
        due = captured.loop_events.uncleared.names_due
        if due:
            self._sources.notices.uncleared([captured.sites.names[k] for k in due])

    def observe(
        self, captured: OptimizerCapture, window: WindowNorms, failed: Callable[[Exception], None]
    ) -> None:
        """Measure, judge and publish a window that no action is carried out on; on a device a step later."""
        ctx = self._rule_bindings.context(captured)
        measurement = self.measure(ctx, window)
        if captured.on_cpu:
            ctx.deferral.flush(failed)
            self.conclude(ctx, measurement)
        else:
            ctx.deferral.take_arrived(failed)
            self.defer(ctx, measurement)

    def defer(self, ctx: OptimizerContext, measurement: Measurement) -> bool:
        """Have a step judged, and published as decided, when it is its turn; whether that is now.

        On the host it is one that is as usual; on a device that is asked when its numbers have arrived.
        """
        deferral = ctx.deferral
        if deferral.judge is None:
            deferral.judge_with(partial(self._conclude_waiting, ctx), _is_usual)
        if measurement.captured.on_cpu:
            if measurement.bound_rules.column_reader.awaiting:
                _note_usual_move(measurement)
            return deferral.submit(measurement)
        deferral.submit_coming(measurement)
        return False

    def _conclude_waiting(self, ctx: OptimizerContext, waiting: deque[Measurement]) -> None:
        """Judge and publish the first of the steps that wait, and with it those behind it that are ordinary too."""
        left = len(waiting)
        try:
            if self._ordinary_steps.conclude(ctx, waiting):
                if self._rule_bindings.hooks.in_backward:
                    self._rule_bindings.hooks.publish_bounds(ctx.rules, ctx.captured.step)
                return
        except Exception as error:
            self._activity.failed("boundary", error)
            if len(waiting) < left:  # they were judged, and are counted as without a Record
                return
        self.conclude(ctx, waiting.popleft())

    def conclude(self, ctx: OptimizerContext, measurement: Measurement) -> Decision:
        """Judge a step whose gradients are gone, or are left to a device, and publish it as decided."""
        judged = self.judge(ctx, measurement)
        self.publish(ctx, judged)
        return judged.decision

    def judge(self, ctx: OptimizerContext, measurement: Measurement, grads_present: bool = False) -> Judged:
        """Decide of a step; `grads_present`: its gradients are here, and its decision is about to be carried out.

        An internal error does not make this rank diverge from the others, where it knows the numbers that they judge.
        What cannot be measured here is left out: rules on other columns than norms (`max_abs`, ranks) miss the step.
        Without a verdict there is one fallback: the standing clips, and the skip of non-finite gradients. What fails
        after the decision costs the Record. Plain replicas, which exchange nothing, cannot learn of an error before
        there is a window to look at (in `OptimizerCapture.close_window`): the others clip that step, this one does not.
        """
        bound_rules = measurement.bound_rules
        if measurement.begins_anew:
            bound_rules.discard_rate()
        shared = self._shared(ctx, measurement)
        if shared is None:  # the other ranks' part of these numbers is missing
            return Judged(Decision())
        measurement.captured.know_reduced_total(shared.total_applied)
        decision: Decision | None = None
        try:
            step = self._step(ctx, measurement, shared)
            # Where some rank has no facts it learns nothing: what others learned now would make them diverge later.
            verdict, decision = (
                (UNJUDGED, Decision()) if shared.blind else self._decisions.ask(bound_rules, step.found)
            )
            decision = self._decisions.permitted(step, verdict, decision)
            judged = self._judged(step, verdict, decision, grads_present)
            self._rule_bindings.hooks.publish_bounds(bound_rules, measurement.window.step + 1)
            return judged
        except Exception as error:
            self._judging_failed(measurement, error)
            if decision is None:
                decision = bound_rules.bound.fallback(shared.window.total(), shared.window.step)
            return Judged(decision.at(shared.own))

    def _judging_failed(self, measurement: Measurement, error: Exception) -> None:
        measurement.bound_rules.health_tracker.unjudged(measurement.captured.step)
        self._activity.failed("boundary", error)

    def _shared(self, ctx: OptimizerContext, measurement: Measurement) -> Shared | None:
        """The step as all ranks see it; after an error only its norms. Raises where this rank cannot know these."""
        window, values = measurement.window, measurement.values()
        try:
            extras, exchange = measurement.extras, measurement.exchange
            return self._ranks.share(measurement.captured, ctx.membership, window, extras, values, exchange)
        except Exception as error:
            shared = self._ranks.norms_alone(ctx.membership, window, values)
            if shared is None:  # the other ranks cannot know what this one would do
                measurement.bound_rules.health_tracker.unjudged(measurement.captured.step)
                raise
            self._judging_failed(measurement, error)
            return shared

    def _step(self, ctx: OptimizerContext, measurement: Measurement, shared: Shared) -> StepContext:
        """The step with its Snapshot; after an error one of its norms alone, by which the other ranks judge it too."""
        captured, bound_rules = measurement.captured, measurement.bound_rules
        coverage = self._sources.capture.coverage
        self._sources.notices.unmeasured(coverage.missing)
        about = captured.index, bound_rules.sites, shared.window
        try:
            found = assemble(*about, shared.extras, shared.values, coverage.ratio)
            histograms = shared.extras.histograms
            if histograms is not None and not histograms.of_octaves:
                self._publishing.totals.count_without_histogram()
        except Exception as error:
            if not self._ranks.several:
                raise
            self._judging_failed(measurement, error)
            found = of_norms(*about, shared.values)
        step = StepContext(ctx, captured, bound_rules, measurement.window, measurement.clock, shared, found)
        self._sources.checkpoints.check_if_due(bound_rules, found.total_norm)
        return self._with_confirmed(step) if bound_rules.health_tracker.confirmed else step

    def _judged(self, step: StepContext, verdict: Verdict, decision: Decision, grads_present: bool) -> Judged:
        """The decision on a step with its reasons: everything for its Record."""
        captured, bound_rules, found, clock = step.captured, step.bound_rules, step.found, step.clock
        decision, snapshot = self._norm_applied.of(step, decision, grads_present)
        if bound_rules.column_reader.awaiting:
            self._note_move(step, decision)
        self._note_ordinary(step, verdict, snapshot)
        broken = not math.isfinite(found.total_norm)
        bound_rules.health_tracker.statistics_read(
            self._sources.statistics.nonfinite(broken), by_this_step=broken
        )
        usual = partial(bound_rules.bound.usual_norms, bound_rules.state)
        findings = self._causes(step, snapshot, verdict, decision, usual)
        if decision.orders and self._sources.causes is not None:
            decision = self._sources.causes.carried_out(decision)
        if verdict.events:
            findings += self._causes_by_norms(bound_rules, usual, verdict, snapshot, findings)
        if self._sources.bundles is not None:
            decision = self._sources.bundles.take(captured, snapshot, verdict, decision, findings, usual)
        facts = Facts(
            bound_rules,
            found,
            snapshot,
            verdict,
            decision,
            clock,
            findings,
            judged=verdict is not UNJUDGED,
            in_turn=NONE_IN_TURN if verdict is UNJUDGED else bound_rules.state.in_turn,
        )
        return Judged(decision.at(step.shared.own), facts)

    def publish(self, ctx: OptimizerContext, judged: Judged, outcome: Outcome | None = None) -> None:
        """Publish the Record of a step: as it was decided, or with what was really done of it."""
        self._publishing.give(judged, outcome)
        if outcome is not None and outcome.error is not None:
            self._ranks.did_otherwise(ctx.captured, ctx.membership)

    def _causes(
        self, step: StepContext, snapshot: Snapshot, verdict: Verdict, decision: Decision, usual: Usual
    ) -> tuple[Finding, ...]:
        """Causes of this step's incidents, where a rule has `localise`."""
        causes, captured = self._sources.causes, step.captured
        if causes is None or captured.inside_backward or captured.without_optimizer:
            return ()
        step_taken = captured.step != snapshot.step
        together = partial(self._ranks.shared_step_name, captured, step.ctx.membership)
        usual_loss = partial(step.bound_rules.bound.usual_loss, step.bound_rules.state)
        return causes.of(verdict, decision, snapshot, step_taken, usual, usual_loss, together)

    def _causes_by_norms(
        self,
        bound_rules: OptimizerRules,
        usual: Usual,
        verdict: Verdict,
        snapshot: Snapshot,
        known: tuple[Finding, ...],
    ) -> tuple[Finding, ...]:
        """Causes of this step's other incidents; an error costs these alone, not the step's Record."""
        try:
            bound, state = bound_rules.bound, bound_rules.state
            only = sum(bool(one.params) for one in self._sources.capture.captures) == 1
            causes = self._sources.causes
            twice = causes is not None and causes.differentiates_twice
            return tuple(causes_by_norms(bound, state, usual, verdict, snapshot, known, only, twice))
        except Exception as error:
            self._activity.failed("localise", error)
            return ()

    def _with_confirmed(self, step: StepContext) -> StepContext:
        """Add what the weights have confirmed of an earlier step: this rank's own, so not where the rule acts."""
        confirmed = step.bound_rules.health_tracker.take_confirmed()
        if self._acts_on_jumps:
            return step
        return step._replace(found=replace(step.found, scalars={**step.found.scalars, **confirmed}))

    def _note_move(self, step: StepContext, decision: Decision) -> None:
        """Note the weights that this step is going to change, for a column that compares them."""
        stepped = (step.window.calls > 0) & (not (decision.skip or step.rejected))
        zero = step.found.norm[step.shared.own] == 0
        step.bound_rules.column_reader.moved(stepped, zero, step.window.step)

    def _note_ordinary(self, step: StepContext, verdict: Verdict, snapshot: Snapshot) -> None:
        """Count ordinary steps, on which nothing changes; reinstall hooks where the few left have miscounted."""
        captured, bound_rules, window = step.captured, step.bound_rules, step.window
        if captured.pruning.pruned and window.pruned is not None and not window.pruned.right:
            self._sources.capture.restore(captured)
        looked_twice = step.shared.window.raw.details
        unusual = verdict.events or verdict.acting or looked_twice or snapshot.provisional
        acting = bound_rules.state.active != NONE_ACTIVE and bound_rules.state.may_act
        bound_rules.count_ordinary(bool(unusual or acting))
        alone = step.ctx.needs_no_ranks or not step.ctx.exchanges
        ordinary = self._defers and bound_rules.ordinary_steps >= ORDINARY and alone
        captured.know_total(snapshot.total_norm, ordinary)


def _is_usual(measurement: Measurement) -> bool:
    """True if a step on a device is as usual, which its measurement keeps; waits for numbers that are not here."""
    usual = measurement.as_usual()
    if usual and measurement.bound_rules.column_reader.awaiting:
        _note_usual_move(measurement)
    return usual


def _note_usual_move(measurement: Measurement) -> None:
    """Note the weights that a step changes which no rule keeps from being taken, for a column that compares them."""
    window = measurement.window
    measurement.bound_rules.column_reader.moved(window.calls > 0, window.raw.norms() == 0, window.step)


def deferral_allowed(engine: Engine, rule_bindings: RuleBindings) -> bool:
    """True if an ordinary step needs no verdict before it is taken.

    So where no rule acts but on non-finite gradients; a clip of the total needs none either (`StepActions.clip_ahead`).
    Bounds for the next backward are made of this step.
    """
    return not engine.acts_on_host and engine.clips_only_total and not rule_bindings.hooks.in_backward
