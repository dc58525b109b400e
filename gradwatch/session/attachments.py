"""Everything that is attached to the models and optimizers of one session, and how it is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.columns.batch_hash import batch_hash
from gradwatch.capture.columns.module_taps import ModuleTaps
from gradwatch.capture.columns.nonfinite_running_statistics import RunningStatistics
from gradwatch.capture.fsdp_backward_end import FlatTaps
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_shards import local_taps
from gradwatch.capture.read_after_backward import Capture
from gradwatch.capture.read_before_user_clip import BeforeClip
from gradwatch.capture.snapshot_assembly import with_modules
from gradwatch.capture.weights.weight_health import Weights
from gradwatch.distributed.ranks import Ranks
from gradwatch.engine import Engine
from gradwatch.engine.actions.backward_clips import asks_backward, drops_micro
from gradwatch.engine.columns_needed import batches_hashed_every
from gradwatch.engine.unsupported_rules import Refusal
from gradwatch.errors import AttachError
from gradwatch.incidents.bundle.snapshot_rules import refused_snapshots, snapshots
from gradwatch.reading.async_copy import Number, capturing
from gradwatch.records.event import Event
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Sites
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.weak_references import Distinct
from gradwatch.session.actions.localise_action import Causes, localising
from gradwatch.session.active_or_paused import STEP_PATH, Activity
from gradwatch.session.binding.backward_actions import module_bounds_of
from gradwatch.session.binding.bind_optimizer import Binder
from gradwatch.session.binding.rank_requirements import rank_requirements
from gradwatch.session.binding.refused_rules import Fitting, refused_here
from gradwatch.session.binding.rule_bindings import RuleBindings
from gradwatch.session.boundary.optimizer_step import Boundary
from gradwatch.session.checkpoint_health import Checkpoints
from gradwatch.session.logged_once import Notices
from gradwatch.session.optimizer_context import Contexts
from gradwatch.session.pipeline.extra_columns import ExtraColumns
from gradwatch.session.pipeline.record_publishing import Publishing
from gradwatch.session.pipeline.step_pipeline import Sources, StepPipeline, deferral_allowed
from gradwatch.session.process_place import ProcessPlace
from gradwatch.session.succession import Handover, watching_of
from gradwatch.session.taken_states import TakenStates
from gradwatch.session.watched_optimizers import Ownership
from gradwatch.taps.pipeline_stages import PipelineStages

if TYPE_CHECKING:
    from gradwatch.session.actions.snapshot_action import Bundles

REPORTED = (*STEP_PATH, "action", "precision", "columns", "modules", "norm_local", "ranks", "localise")


class Closeable(Protocol):
    """A part that is hooked to something."""

    def close(self) -> None:
        """Remove what hooks it."""


P = TypeVar("P", bound=Closeable)


class Rules:
    """The rules of a session: those given, without what cannot be carried out on its models and ranks."""

    def __init__(self, ruleset: RuleSet, run: RunInfo, fitting: Fitting) -> None:
        self._fitting = fitting
        self.run = run
        self._take(ruleset)
        self.fit(refused_snapshots(ruleset))

    def fit(self, refusals: list[Refusal]) -> None:
        """Go on without what is refused; raise `UnfitRulesError` unless that may be."""
        fitted = self._fitting.without(refusals, self.ruleset)
        if fitted is not self.ruleset:
            self._take(fitted)

    def _take(self, ruleset: RuleSet) -> None:
        self.ruleset, self.engine = ruleset, Engine(ruleset, self.run.rank)
        self.run = replace(self.run, rules=self.engine.rule_infos)


@dataclass(frozen=True, slots=True)
class Services:
    """Services that every part of a session reports to."""

    activity: Activity
    notices: Notices
    publishing: Publishing
    fitting: Fitting


class Attached:
    """The parts of one session, from the taps on the models up to the step boundary.

    `start` hooks the boundary, once the sinks are open; `own_sinks` are those that a rule asks for beside the file's.
    """

    def __init__(
        self,
        models: list[nn.Module],
        ownership: Ownership,
        loose: Sequence[tuple[str, nn.Parameter]],
        rules: Rules,
        services: Services,
        strict_rules: bool,
        name: str,
        before: Handover | None = None,
    ) -> None:
        """`name` is the same on all ranks that run one script. Raises where the rules do not fit these models.

        With `before` it goes on with what another session, whose place its own takes, has learned of them.
        """
        self.rules = rules
        self._services = services
        self._activity, self._notices = services.activity, services.notices
        self.ownership = ownership
        self._containers: list[nn.Module] = []
        self._bound = 0  # captures, from the first, that were seen to have rules
        self._parts: list[
            Closeable
        ] = []  # those that are hooked to anything, in the order in which they were made
        self.contexts = Contexts(self._activity.failed)
        spent = services.publishing.totals.own_time
        try:
            self.capture = self._part(
                Capture((), self._backward_ended, self._activity.failed, spent, ownership)
            )
            self.capture.slots.add_models(models, None if before is None else before.watching.prefixes)
            self.capture.slots.add_loose(loose, ownership.given(()))
            if before is not None:
                self.capture.slots.add_loose(before.watching.held_by_script)
            wanted = self._tapped(models, strict_rules)
            self._bind_to(wanted, name)
            if before is not None:
                self._go_on_from(before)
            self._hold(models)
        except BaseException:
            self.close()
            raise

    def _part(self, part: P) -> P:
        """A part that `close` will close."""
        self._parts.append(part)
        return part

    def _tapped(self, models: list[nn.Module], strict_rules: bool) -> list[nn.Parameter]:
        """Tap modules and FSDP's flat parameters; the parameters to watch."""
        if not self.capture.slots.can_be_reached and not self.capture.slots.lazy_names():
            raise AttachError(
                "no parameter of the model wants a gradient, so there is nothing to watch; "
                "attach after unfreezing it (requires_grad_)"
            )
        rules, failed = self.rules, self._activity.failed
        self.taps = self._services.fitting.taps(rules.engine, models, failed)
        if self.taps is not None:
            self._part(self.taps)
        self._part(FlatTaps(models, self.capture.expect, failed))
        return self._fit(rules, self.taps, models, strict_rules)

    def _fit(
        self, rules: Rules, taps: ModuleTaps | None, models: list[nn.Module], strict_rules: bool
    ) -> list[nn.Parameter]:
        """Fit rules to the models; the parameters to watch. Raises where they do not fit."""
        wanted, sites = self.capture.slots.wanting(), self._sites_with(taps)
        rules.fit(refused_here(rules.engine, sites, models, wanted, rules.run.world_size))
        rules.engine.check(sites, strict_rules)
        return wanted

    def check(self, ruleset: RuleSet, fitting: Fitting, strict_rules: bool) -> None:
        """Raise where other rules would not fit the models; nothing stays attached for them."""
        rules, models = Rules(ruleset, self.rules.run, fitting), self.capture.slots.models()
        taps = fitting.taps(rules.engine, models, self._activity.failed)
        try:
            self._fit(rules, taps, models, strict_rules)
        finally:
            if taps is not None:
                taps.close()

    def _go_on_from(self, before: Handover) -> None:
        self.rule_bindings.saved_states.go_on_from(before.states)
        self.rule_bindings.count_on(before.parameters)
        self.weights.load(before.weights)

    def _bind_to(self, wanted: Sequence[nn.Parameter], name: str) -> None:
        """Make the parts that rules are bound in; `wanted` are the parameters that want a gradient."""
        capture, activity, rules = self.capture, self._activity, self.rules
        self.statistics = RunningStatistics(capture.slots.models, self._notices.say)
        self.weights = Weights(capture.named, capture.slots.unoptimized, self.statistics.named)
        self._stages = self._part(PipelineStages(self._stage_scaled))
        self.ranks = Ranks(
            name, rank_requirements(rules.engine), capture.slots.models, self._of_ranks, self._stages.taken
        )
        totals = self._services.publishing.totals
        self.rule_bindings = RuleBindings(rules.engine, self.ranks, activity, self.contexts, totals)
        self._part(self.rule_bindings.hooks)
        self.checkpoints = Checkpoints(
            self.contexts, self.rule_bindings, self.weights, self.statistics, activity, totals
        )
        bounds = None
        if self.taps is not None:
            bounds = module_bounds_of(rules.ruleset, activity.failed, activity.health.report)
            self.taps.bound_by(bounds)
        self.rule_bindings.hooks.listen(local_taps(wanted, capture.slots.models()), bounds)

    def _hold(self, models: list[nn.Module]) -> None:
        """Hold steps to find causes and keep bundles, where rules ask for that.

        Before the boundary is hooked: a recorded step ends before it is judged.
        """
        self.causes: Causes | None = None
        self._bundles: Bundles | None = None
        rules, failed = self.rules, self._activity.failed
        keeps = bool(snapshots(rules.ruleset))
        if keeps or localising(rules.ruleset):
            self.causes = self._part(Causes(rules.ruleset, models, self.owns, failed, rules.run.rank))
        for component in REPORTED:
            self._activity.health.mark(component, True)
        if keeps and self.causes is not None:
            from gradwatch.session.actions.snapshot_action import Bundles  # few rules keep one

            self._bundles = Bundles(rules.ruleset, self.causes, failed, rules.run)
        self.own_sinks = [] if self._bundles is None else [self._bundles]

    def start(self, on_escalate: Callable[[Event], object] | None, counted: Distinct | None = None) -> None:
        """Hook the step boundary: from here on steps are judged. `counted` optimizers are not counted again."""
        capture, activity, engine, notices = self.capture, self._activity, self.rules.engine, self._notices
        self.note_inactive()
        self.binder = Binder(
            capture,
            self.ranks,
            self.contexts,
            self.rule_bindings,
            self.checkpoints,
            self.taps,
            self._stages,
            activity,
            notices,
            self.note_inactive,
        )
        defers = deferral_allowed(engine, self.rule_bindings)
        self.extra_columns = ExtraColumns(
            self.taps,
            capture.spent.news,
            defers,
            activity.failed,
            self._batch,
            () if self.causes is None else batches_hashed_every(engine.ruleset),
        )
        sources = Sources(
            capture, self.statistics, self.checkpoints, self.causes, self._bundles, notices, on_escalate
        )
        publishing = self._services.publishing
        self.pipeline = StepPipeline(
            engine, self.ranks, activity, self.rule_bindings, self.extra_columns, publishing, sources
        )
        self.boundary = self._part(
            Boundary(
                capture,
                self.ownership,
                self.contexts,
                self.binder,
                self.pipeline,
                self.ranks,
                activity,
                notices,
                self._reset,
            )
        )
        if counted is not None:
            self.boundary.count_on(counted)
        self.taken_states = self._part(TakenStates(capture, self.boundary, publishing.sinks, activity))
        capture.call_when_cleared(self._cleared)
        not_finite = None if self.causes is None else self.causes.loss_not_finite
        capture.losses.report_to(self._no_loss, not_finite)
        self.before_clip = self._part(BeforeClip(capture, self._bind, activity.idle, activity.failed))

    def bind_before_backward(self) -> None:
        """Bind the rules before the first backward, where some act inside it and the optimizer is known."""
        if asks_backward(self.rules.ruleset) or drops_micro(self.rules.ruleset):
            for captured in self.capture.adopt_waiting(from_first_backward=True):
                self.binder.bind(captured)

    # -- what is asked of it -----------------------------------------------------------------------------

    def owns(self, optimizer: Optimizer) -> bool:
        """True if this optimizer is watched now."""
        return not self._activity.idle() and self.ownership.includes(optimizer, self.capture)

    def sites(self) -> Sites:
        """Every parameter that wants a gradient, and every module that is tapped."""
        return self._sites_with(self.taps)

    def _sites_with(self, taps: ModuleTaps | None) -> Sites:
        return with_modules(self.capture.slots.all_sites(), () if taps is None else taps.names)

    def hand_over(self, place: ProcessPlace, unrecorded: int) -> Handover:
        """Everything that another session goes on with; `unrecorded` steps of it are in no journal."""
        return Handover(
            watching_of(self.capture, self.ownership),
            self.rule_bindings.saved_states.learned(self.capture.captures),
            self.weights.to_dict(),
            self.boundary.optimizers,
            self.rule_bindings.most_parameters,
            unrecorded,
            place,
        )

    @property
    def between_windows(self) -> bool:
        """True if no gradient waits for a step of anything."""
        return not any(
            one.backwards and any(grad is not None for grad in one.grads()) for one in self.capture.captures
        )

    @property
    def degraded(self) -> bool:
        """True if some optimizer goes on without collectives that its rules need."""
        return any(ctx.membership is not None and ctx.membership.alone for ctx in self.contexts)

    def note_inactive(self) -> None:
        """Note which rules judge nothing of the model as it is now."""
        self._notices.inactive(
            self._services.fitting, self.rules.ruleset, self.rule_bindings.inactive, self.sites
        )

    def add(self, models: Iterable[nn.Module]) -> list[nn.Module]:
        """Watch further models; those of them that were not watched yet."""
        self.capture.release_freed()
        added = self.capture.slots.add_models(models)
        if self.capture.slots.watched.undecided:
            self._notices.undecided(self.capture.slots.watched.undecided)
        if added and self.causes is not None:
            self.causes.add(added)
        return added

    def keep_containers(self, models: Iterable[nn.Module]) -> None:
        """Hold those that may have been made for the call: they would be gone after it, and the session with them."""
        for one in models:
            if isinstance(one, nn.ModuleList | nn.ModuleDict):
                self._containers.append(one)

    def resumed(self) -> None:
        """Discard, at the end of a pause, what was captured in it: it is no step's."""
        for captured in self.capture.captures:
            captured.interrupt()

    def close(self) -> None:
        """Remove every hook, also of what was made only in part; models and optimizers are as found."""
        memberships = [ctx.membership for ctx in self.contexts if ctx.membership is not None]
        for part in (*memberships, *reversed(self._parts)):
            try:
                part.close()
            except Exception as error:  # the others must be restored all the same
                self._activity.health.report("close", error)
        self._parts.clear()
        self._containers.clear()

    # -- what taps report --------------------------------------------------------------------------------

    def _batch(self) -> Number | None:
        """The hash of what the models were called with; None where not all of it is held as it was."""
        try:
            given = [] if self.causes is None else self.causes.batch()
            return None if given is None else batch_hash(given)
        except Exception as error:
            self._activity.failed("columns", error)
            return None

    def _bind(self, captured: OptimizerCapture) -> None:
        self.binder.bind(captured)

    def _backward_ended(self, touched: list[OptimizerCapture]) -> None:
        if self._activity.idle():
            return
        captures = self.capture.captures
        for captured in captures:
            if not captured.on_cpu and capturing():
                return  # a read would become part of the user's CUDA graph, or break it
        if self.rule_bindings.hooks.measure_or_act:
            self.rule_bindings.hooks.backward_ended()
        made = len(captures)  # before they are looked at: another thread may make one more meanwhile
        if self._bound < made:
            self.binder.bind_missing()
            self._bound = made
        for captured in touched:  # the gradients of others may have been clipped since they were read
            if captured.due():
                captured.read()

    def _stage_scaled(self, stage: nn.Module) -> None:
        """Read again what the backwards of a pipeline stage left: its gradients are final."""
        if not self._activity.serving or self._activity.paused():
            return
        params = set(map(id, stage.parameters()))
        with torch.no_grad():
            for ctx in self.contexts:
                if not params.isdisjoint(ctx.captured.param_ids):
                    ctx.captured.read()

    def _reset(self, captured: OptimizerCapture) -> None:
        """Discard what tensor hooks measured since the capture's last Snapshot: it belongs to no step."""
        self.rule_bindings.hooks.discard(captured)
        if self.causes is not None:
            self.causes.discard()

    def _cleared(self, captured: OptimizerCapture) -> None:
        """Count gradients of earlier backwards that are gone, with no step taken by them."""
        self.rule_bindings.hooks.cleared(captured)
        if not self._activity.idle():  # while it pauses it sees no steps, either
            unused = self.contexts.of(captured).unused_gradients
            if unused.unused(captured, self.capture.captures):
                moved = captured.weights_moved
                self._services.publishing.totals.count_cleared(captured.left_nonfinite, moved)
                if moved and not captured.step and captured.optimizer is not None:
                    self._notices.unseen_steps(type(captured.optimizer()).__name__)
        if self.causes is not None:
            self.causes.cleared(None if captured.optimizer is None else captured.optimizer())

    def _of_ranks(self, component: str, error: BaseException) -> None:
        """Something about the other ranks: reported, but no internal error that would pause anything."""
        self._activity.health.report(component, error)
        self._activity.health.mark(component, not self.degraded)

    def _no_loss(self, reason: str) -> None:
        """A backward whose root is no loss: said once, where a rule needs one."""
        if "loss" in self.rules.engine.columns and not self._activity.idle():
            self._notices.no_loss(reason)
