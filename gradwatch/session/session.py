"""The composition root: the one place where capture, rules, actions and sinks meet."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.account import NOTHING_TAKEN, Account, Ending
from gradwatch.account.ending import printed_at_exit
from gradwatch.capture.assemble import with_modules
from gradwatch.capture.columns.modules import ModuleTaps
from gradwatch.capture.columns.running_statistics import RunningStatistics
from gradwatch.capture.discarded import Discarded
from gradwatch.capture.fsdp1 import FlatTaps
from gradwatch.capture.optimizer import Lane
from gradwatch.capture.parameters import Capture
from gradwatch.capture.shards import local_taps
from gradwatch.capture.user_clip import BeforeClip
from gradwatch.capture.weights import Weights
from gradwatch.checkpoint import joined
from gradwatch.distributed.placement import placed
from gradwatch.distributed.ranks import Ranks
from gradwatch.engine import Engine
from gradwatch.engine.backward import asks_backward, drops_micro
from gradwatch.engine.unfit import Refusal
from gradwatch.errors import AttachError
from gradwatch.incidents.bundle.asked import refused_snapshots, snapshots
from gradwatch.localise.hold.pre_attach import Early
from gradwatch.reading.device import capturing
from gradwatch.records.snapshot import CheckpointHealth, Event, Record, RunInfo, Sites
from gradwatch.rules.model import RuleSet
from gradwatch.runtime.health import Health
from gradwatch.runtime.process import here
from gradwatch.session.accounting import Accounting, Counted, of_process, steps_concluded
from gradwatch.session.activity import STEP_PATH, Activity
from gradwatch.session.binding.backward_rules import module_bounds_of
from gradwatch.session.binding.binder import Binder
from gradwatch.session.binding.bindings import Courses
from gradwatch.session.binding.fitting import Fitting, refused_here
from gradwatch.session.binding.rank_rules import wants
from gradwatch.session.boundary.optimizer_step import Boundary
from gradwatch.session.bundles import Bundles
from gradwatch.session.causes import Causes, localising
from gradwatch.session.checkpoints import Checkpoints
from gradwatch.session.context import Contexts
from gradwatch.session.lifetimes import LIVE
from gradwatch.session.measuring import Measuring
from gradwatch.session.notices import Notices
from gradwatch.session.ownership import Ownership
from gradwatch.session.pipeline import Sources, StepPipeline, deferral_allowed
from gradwatch.session.publish import Publishing
from gradwatch.session.settings import Settings, check_directory, quiet_asked, run_info, sink_specs
from gradwatch.sinks import Sink, make_sink
from gradwatch.sinks.breaker import Breaker
from gradwatch.taps.pipeline import PipelineStages
from gradwatch.taps.process_totals import TOTALS, count_backwards

REPORTED = (*STEP_PATH, "action", "precision", "modules", "norm_local", "ranks", "localise")
NOTHING_SAVED: Mapping[str, Any] = {"version": 1, "lanes": {}}

_ordinal = itertools.count()  # of sessions: ranks that run one script count alike


class Session:
    """Everything that watches one training; see `gradwatch.watch`. Users have it as a `Watch`.

    `run` is its identity, `health` counts internal errors; `active` False: nothing is attached, nothing is written.
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        ruleset: RuleSet,
        settings: Settings,
        sinks: Sequence[Sink] | None,
        origin: str,
        active: bool = True,
        on_escalate: Callable[[Event], object] | None = None,
        loose: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        self.origin = origin
        self.ended: Ending = ""
        self._closed = not active
        self._strict = settings.strict
        self._on_escalate = on_escalate
        self._publishing = Publishing()
        self._sinks: list[Breaker] = self._publishing.sinks
        self.health = Health(on_first=lambda component, error: self._notices.say(component, error))
        self._notices = Notices(self._sinks, self.health)
        self._activity = Activity(self.health, settings.strict, self._resumed)
        self._fitting = Fitting(origin == "launcher" and not settings.strict_rules)
        self._ownership = Ownership(optimizers)
        self._accounting: Accounting | None = None
        self._causes: Causes | None = None
        self._concluding = False
        self._last_state = NOTHING_SAVED
        self._containers: list[nn.Module] = []
        self._open: list[Breaker] = []
        self._number = next(_ordinal)
        self.ruleset, self._engine = ruleset, Engine(ruleset)
        run = run_info(ruleset, self._engine.rule_infos, settings)
        self.run: RunInfo = placed(run, named=settings.run_id is not None) if active else run
        if active:
            self._arm(ruleset)
            self._attach(models, settings, sinks, loose)

    # -- attaching ---------------------------------------------------------------------------------------

    def _arm(self, ruleset: RuleSet) -> None:
        """Make these the rules of this session."""
        self.ruleset, self._engine = ruleset, Engine(ruleset, self.run.rank)
        self.run = replace(self.run, rules=self._engine.rule_infos)

    def _fit(self, refusals: list[Refusal]) -> None:
        """Go on without what is refused; raise `UnfitRulesError` unless that may be."""
        fitted = self._fitting.without(refusals, self.ruleset)
        if fitted is not self.ruleset:
            self._arm(fitted)

    def _attach(
        self,
        models: list[nn.Module],
        settings: Settings,
        sinks: Sequence[Sink] | None,
        loose: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        self._fit(refused_snapshots(self.ruleset))
        specs = sink_specs(self.ruleset, settings, self.run.rank)
        if sinks is None and any(spec.kind == "journal" for spec in specs):
            check_directory(settings.run_root(self.ruleset))
        chosen = [make_sink(spec.kind, spec.options) for spec in specs] if sinks is None else list(sinks)
        self._capture = Capture(
            models,
            self._backward_ended,
            self._activity.failed,
            lambda: self._ownership.waiting(self._capture),
        )
        self._capture.add_loose(loose)
        self._taps: ModuleTaps | None = None
        self._flat = FlatTaps((), self._capture.hear, self._activity.failed)
        try:
            wanted = self._tapped(models, settings)
        except BaseException:
            if self._taps is not None:
                self._taps.close()
            self._flat.close()
            self._capture.close()
            raise
        self._assemble(wanted)
        chosen += self._evidence(models)
        self._open_sinks(chosen)
        self._put_together()
        self._activity.begin(self.run.pid)
        self._go_live(models)

    def _tapped(self, models: list[nn.Module], settings: Settings) -> list[nn.Parameter]:
        """Tap modules and FSDP's flat parameters; the parameters to watch. Raises where the rules do not fit them."""
        if not self._capture.hears and not self._capture.lazy_names():
            raise AttachError(
                "no parameter of the model wants a gradient, so there is nothing to watch; "
                "attach after unfreezing it (requires_grad_)"
            )
        self._taps = self._fitting.taps(self._engine, models, self._activity.failed)
        self._flat = FlatTaps(models, self._capture.hear, self._activity.failed)
        wanted = [param for param in self._capture.params if param.requires_grad]
        sites = self._all_sites()
        self._fit(refused_here(self._engine, sites, models, wanted, self.run.world_size))
        self._engine.check(sites, settings.strict_rules)
        return wanted

    def _assemble(self, wanted: Sequence[nn.Parameter]) -> None:
        """Make the parts that rules are bound in; `wanted` are the parameters that want a gradient."""
        capture, activity, failed = self._capture, self._activity, self._activity.failed
        self.statistics = RunningStatistics(self.models, self._notices.say)
        self.weights = Weights(lambda: zip(capture.names, capture.params, strict=False), capture.unmoved)
        self._contexts = Contexts(failed)
        self._stages = PipelineStages(self._stage_scaled)
        name = f"{self.run.attempt}/{self._number}"
        self._ranks = Ranks(name, wants(self._engine), self.models, self._of_ranks, self._stages.taken)
        totals = self._publishing.totals
        self._courses = Courses(self._engine, self._ranks, activity, self._contexts, totals)
        self._checkpoints = Checkpoints(self._contexts, self._courses, self.weights, activity)
        if self._taps is not None:
            self._taps.bounds = module_bounds_of(self.ruleset, failed, self.health.report)
            self._courses.module_bounds = self._taps.bounds
        self._courses.listen(local_taps(wanted, capture.models()))
        self._discarded = Discarded()

    def _evidence(self, models: list[nn.Module]) -> list[Sink]:
        """What holds steps to find causes and keep bundles; before the boundary is hooked.

        A recorded step ends before it is judged. The sinks that this needs.
        """
        self._bundles: Bundles | None = None
        keeps = bool(snapshots(self.ruleset))
        if keeps or localising(self.ruleset):
            self._causes = Causes(self.ruleset, models, self.owns, self._activity.failed, self.run.rank)
        for component in REPORTED:
            self.health.mark(component, True)
        if keeps and self._causes is not None:
            self._bundles = Bundles(self.ruleset, self._causes, self._activity.failed, self.run)
        return [] if self._bundles is None else [self._bundles]

    def _open_sinks(self, chosen: Sequence[Sink]) -> None:
        """Before the boundary is hooked: a thread that trains may step at any moment."""
        self._sinks += [Breaker(sink, self.health, strict=self._strict) for sink in chosen]
        self._open = list(self._sinks)
        for sink in self._sinks:
            sink.open(self.run)
        for sink in self._sinks:
            moved = getattr(sink.sink, "moved", "")
            if moved:
                self._notices.say(sink.name, AttachError(moved))
        self._note_inactive()

    def _put_together(self) -> None:
        """The flow of a step, from the boundary down."""
        capture, activity, engine = self._capture, self._activity, self._engine
        parts = capture, self._ranks, self._contexts, self._courses, self._checkpoints, self._taps
        self._binder = Binder(*parts, self._stages, activity, self._notices, self._note_inactive)
        self._measuring = Measuring(self._taps, capture.spent.news, deferral_allowed(engine, self._courses))
        sources = Sources(
            capture,
            self.statistics,
            self._checkpoints,
            self._causes,
            self._bundles,
            self._notices,
            self._on_escalate,
        )
        self._pipeline = StepPipeline(
            engine, self._ranks, activity, self._courses, self._measuring, self._publishing, sources
        )
        self._boundary = Boundary(
            capture,
            self._ownership,
            self._contexts,
            self._binder,
            self._pipeline,
            self._ranks,
            activity,
            self._notices,
            self._reset,
        )
        capture.cleared = self._cleared
        capture.losses.refused = self._no_loss
        self._before_clip = BeforeClip(
            capture,
            lambda: self._ownership.waiting(capture),
            self._bind,
            activity.resting,
            activity.failed,
        )

    def _go_live(self, models: list[nn.Module]) -> None:
        """Everything is there: count from here on, and act inside the first backward where rules ask for that."""
        # A launcher's session answers for all that the process does, any other one from here on.
        before = NOTHING_TAKEN if self.origin == "launcher" else TOTALS.taken()
        self._accounting = accounting = Accounting(
            self.run,
            self._publishing.totals,
            self._courses,
            self.health.inactive,
            self._counted,
            before,
            lambda: steps_concluded() + sum(one.steps for one in LIVE.all() if one is not self),
        )
        self.health.counts(lambda: asdict(TOTALS.taken()), accounting.without_data)
        LIVE.close_orphans()
        LIVE.add(self)
        # After: the backward that finds the models gone is none of this session's.
        self._uncount = count_backwards()
        self._keep_containers(models)
        if asks_backward(self.ruleset) or drops_micro(self.ruleset):
            for optimizer in self._ownership.waiting(self._capture):
                lane = self._capture.adopt(optimizer)
                lane.born = False  # it gets its window from the first backward on
                self._binder.bind(lane)

    def _bind(self, lane: Lane) -> None:
        self._binder.bind(lane)

    # -- what taps report --------------------------------------------------------------------------------

    def _backward_ended(self, touched: list[Lane]) -> None:
        if self._activity.resting():
            return
        for lane in self._capture.lanes:
            if not lane.on_cpu and capturing():
                return  # a read would become part of the user's CUDA graph, or break it
        self._courses.backward_ended()
        self._binder.bind_missing()
        for lane in touched:  # the gradients of others may have been clipped since they were read
            if lane.due():
                lane.read()

    def _stage_scaled(self, stage: nn.Module) -> None:
        """The gradients of a pipeline stage are final: read again what its backwards left."""
        if self._closed or self._activity.paused():
            return
        params = set(map(id, stage.parameters()))
        with torch.no_grad():
            for ctx in self._contexts:
                if not params.isdisjoint(ctx.lane.param_ids):
                    ctx.lane.read()

    def _reset(self, lane: Lane) -> None:
        """Nothing that tensor hooks measured since the lane's last Snapshot belongs to a step."""
        self._courses.forget(lane)
        if self._causes is not None:
            self._causes.forget()

    def _cleared(self, lane: Lane) -> None:
        """Gradients of earlier backwards are gone, and no step was taken by them."""
        self._courses.cleared(lane)
        if not self.resting():  # while it pauses it sees no steps, either
            self._publishing.totals.cleared += self._discarded.unused(lane, self._capture.lanes)
        if self._causes is not None:
            self._causes.cleared(None if lane.optimizer is None else lane.optimizer())

    def _resumed(self) -> None:
        """A pause is over: what was captured in it is no step's."""
        for lane in self._capture.lanes:
            lane.discard()
            lane.tainted = True

    def _of_ranks(self, component: str, error: BaseException) -> None:
        """Something about the other ranks: reported, but no internal error that would pause anything."""
        self.health.report(component, error)
        self.health.mark(component, not self.degraded)

    def _no_loss(self, reason: str) -> None:
        """A backward whose root is no loss: said once, where a rule needs one."""
        if "loss" in self._engine.columns and not self.resting():
            self._notices.no_loss(reason)

    def _note_inactive(self) -> None:
        self._notices.inactive(self._fitting, self.ruleset, self._courses.inactive, self._all_sites)

    def _all_sites(self) -> Sites:
        return with_modules(self._capture.all_sites(), () if self._taps is None else self._taps.names)

    def _keep_containers(self, models: Iterable[nn.Module]) -> None:
        # One may have been made for the call, and would be gone after it, and the session with it.
        self._containers += [one for one in models if isinstance(one, nn.ModuleList | nn.ModuleDict)]

    # -- state -------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether nothing is attached."""
        return self._closed

    def resting(self) -> bool:
        """Whether nothing is watched now: closed, not attached yet, a forked child, a pause after internal errors."""
        return self._activity.resting()

    def failed(self, component: str, error: BaseException) -> None:
        """Count an internal error. Raises it if `strict`."""
        self._activity.failed(component, error)

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive; none once it is closed."""
        return [] if self._closed else self._capture.models()

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is watched now."""
        return not self.resting() and self._ownership.includes(optimizer, self._capture)

    def optimizers(self) -> list[Optimizer]:
        """Those named at the attach, in that order, then those adopted since."""
        return self._ownership.given(None if self._closed else self._capture)

    def lanes(self) -> list[Lane]:
        """What is captured of every optimizer watched, those that are gone included."""
        return [] if self._closed else list(self._capture.lanes)

    def lane_of(self, optimizer: Optimizer) -> Lane | None:
        """What is captured of this optimizer, None where it is not watched yet."""
        return None if self._closed else self._capture.lane_of(optimizer)

    def knows(self, identity: int) -> bool:
        """Whether the parameter with this `id()` is watched here."""
        return not self._closed and self._capture.covers_id(identity)

    @property
    def backwards(self) -> int:
        """How many backwards have reached a parameter that is watched here."""
        return 0 if self._accounting is None else self._capture.backwards

    @property
    def steps(self) -> int:
        """Optimizer steps watched that no concluded account holds yet."""
        return 0 if self._concluding else self._boundary.steps

    @property
    def degraded(self) -> bool:
        """Whether some optimizer goes on without the other ranks, though they are needed."""
        return any(ctx.seat is not None and ctx.seat.alone for ctx in self._contexts)

    @property
    def url(self) -> str | None:
        """Where /metrics is served, None without an endpoint."""
        for breaker in self._sinks:
            address = getattr(breaker.sink, "url", None)
            if address:
                return str(address)
        return None

    @property
    def coverage(self) -> float:
        """Parameters that can be measured over parameters that want a gradient, 0..1."""
        return 0.0 if self._closed else self._capture.count_coverage()

    def records(self) -> list[Record]:
        """The latest Record of every optimizer."""
        if self._accounting is None:
            return []
        return [course.record for course in self._courses if course.record is not None]

    def checkpoint(self) -> CheckpointHealth:
        """The health of a checkpoint saved now; looks at the weights. After `close()`: as of the last step."""
        if self._accounting is None:
            return joined(())
        if self._closed:
            return self._checkpoints.now()
        self.catch_up()
        found = self._checkpoints.look()
        if self._activity.paused():
            why = (*found.reasons, "watching is paused after faults of gradwatch's own")
            return replace(found, healthy=False, reasons=why)
        return found

    def account(self) -> Account:
        """What the process did since the attach, beside what was watched of it. After `close()`: as it was then."""
        if self._accounting is None:
            return Account()
        if self._accounting.final is None:
            self.catch_up()
        return self._accounting.now(self.ended)

    def _counted(self) -> Counted:
        boundary = self._boundary
        return Counted(boundary.steps, self.backwards, boundary.optimizers.count, self._activity.pauses)

    def observed_only(self) -> list[int]:
        """Indices of the loops without an optimizer."""
        return [lane.index for lane in self.lanes() if lane.without_optimizer]

    # -- what the script or its launcher asks for --------------------------------------------------------

    def observe(self, scalars: Mapping[str, float | Tensor]) -> None:
        """Keep one-per-step values for the next step of every optimizer; raises nothing."""
        if self._closed:
            return
        for name, value in scalars.items():
            try:
                self._measuring.observe(name, value)
            except AttachError as error:  # the value is not used
                self.health.notice("observe", str(error))
            except Exception as error:
                self._activity.failed("observe", error)

    def batch(self, indices: Iterable[int] | Tensor) -> None:
        """Note which samples of the dataset make the forward calls that follow; raises nothing."""
        if self._closed or self._causes is None:
            return
        try:
            self._causes.tell(indices)
        except Exception as error:
            self._activity.failed("localise", error)

    def closure(self, run: Callable[[], Any]) -> AbstractContextManager[None]:
        """While this is entered, the step to localise is what `run` computes."""
        return nullcontext() if self._causes is None else self._causes.closure(run)

    def read_before_clip(self) -> None:
        """Read the gradients now, before code of the script clips them."""
        if not self._closed:
            self._before_clip.read()

    def rebaseline(self, glob: str) -> None:
        """Start the baselines of parameters whose names match `glob` afresh, in every optimizer."""
        if not self._closed:
            self.catch_up()
            self._courses.rebaseline(glob)

    def add(self, models: Iterable[nn.Module]) -> None:
        """Watch further models in the same run; their optimizers are adopted at their first step."""
        added = list(models)
        self._capture.add_models(added)
        if self._causes is not None:
            self._causes.add(added)
        self._keep_containers(added)

    def join(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        loose: Iterable[tuple[str, nn.Parameter]] = (),
    ) -> None:
        """Watch further optimizers, from the next backward on; `models` name their parameters, all but the `loose`."""
        mark = self._capture.spent.begin()
        known = {id(model) for model in self.models()}
        if added := [model for model in models if id(model) not in known]:
            self.add(added)
        self._capture.join(optimizers, loose)
        self._ownership.join(optimizers)
        self._capture.spent.end(mark)

    def inherit(self, early: Early, joining: Iterable[nn.Module] = ()) -> None:
        """Localise this step too, by calls held before its models were watched, or `join`."""
        if self._causes is not None and not self._closed:
            self._causes.inherit(early, joining)

    def let_go_of_dead(self) -> None:
        """Free the parameters of optimizers and models that are gone, before the next step would."""
        if self._closed or not self._activity.is_step_thread():
            return
        if self.orphaned():
            self._capture.release()
        else:
            self._capture.let_go_of_dead()

    def orphaned(self) -> bool:
        """Whether all models are gone that it was to watch; a launcher's session watches what comes, too."""
        return self.origin != "launcher" and not self._closed and self._capture.childless()

    def catch_up(self) -> None:
        """Judge what was put off; not in a forked child, nor in a thread that may race the one that trains."""
        if not self._closed and here[0] == self.run.pid and self._activity.is_step_thread():
            self._boundary.flush()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything seen so far is where it belongs (journal on disk); False if it is not."""
        if self._closed:
            return True
        self.catch_up()
        deadline = time.monotonic() + timeout
        done = [sink.flush(max(0.0, deadline - time.monotonic())) for sink in self._sinks]
        return all(done)

    def state_dict(self) -> dict[str, Any]:
        """Baselines, streaks and step counts."""
        if self._closed:
            return dict(self._last_state)
        self.catch_up()
        lanes = self._courses.saved(self._capture.lanes)
        return {"version": 1, "lanes": lanes, "weights": self.weights.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; parameters that are new start afresh, by name.

        Raises AttachError for a state of another version.
        """
        if state.get("version") != 1:
            raise AttachError(
                f"this state was saved by another version: {state.get('version')!r}, expected 1"
            )
        if self._accounting is None:
            return
        self.catch_up()
        self._courses.load(state["lanes"], [] if self._closed else self._capture.lanes)
        self.weights.load(state.get("weights"))

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove every hook, flush and close every sink; model and optimizer are as found. Idempotent."""
        if self._closed:
            return
        if os.getpid() != self.run.pid:  # forked: what is open is the parent's
            self._sinks.clear()
        try:
            self._last_state = self.state_dict()
            self.checkpoint()
        except Exception as error:  # a session that cannot tell its state must still let go
            self.health.report("close", error)
        self.conclude()
        taps = [self._stages, self._taps, self._flat, self._causes]
        parts = [self._before_clip, self._boundary, *taps, self._courses, self._capture]
        seats = [ctx.seat for ctx in self._contexts]
        for part in (*seats, *parts):
            try:
                if part is not None:
                    part.close()
            except Exception as error:  # the others must be given back all the same
                self.health.report("close", error)
        self._uncount()
        self._closed = True
        self._activity.end()
        self._containers.clear()
        self.close_sinks()
        LIVE.discard(self)

    def conclude(self) -> None:
        """Tell the sinks what this session comes to; once."""
        # Forked: the account is the parent's.
        if self._concluding or self.run.pid != here[0] or self._accounting is None:
            return
        self._concluding = True
        try:
            account = self.account()
        except Exception as error:
            self.health.report("close", error)
            return
        self._accounting.conclude(account)
        quiet = not account.told or printed_at_exit[0] or quiet_asked()
        for sink in self._sinks:
            if not (quiet and sink.name == "log"):
                sink.conclude(account)

    @property
    def concluding(self) -> bool:
        """Whether its account is a part of the process's already."""
        return self._concluding

    def close_sinks(self) -> None:
        """At `close` or at exit, once; never in a forked child, where they are the parent's."""
        while self._open and os.getpid() == self.run.pid:
            self._open.pop(0).close()


def live_sessions() -> list[Session]:
    """Every session of this process that has not been closed."""
    LIVE.close_orphans()
    return list(LIVE.all())


def account_of_process() -> Account:
    """What this process did, beside what all its sessions, closed or not, have seen of it."""
    here_now = [one for one in LIVE.all() if one.run.pid == here[0]]
    return of_process([one.account() for one in here_now if not one.concluding])
