"""The composition root: the one place where capture, rules, actions and sinks meet and the loop closes."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

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
from gradwatch.capture.window import Window
from gradwatch.distributed.placement import placed
from gradwatch.distributed.ranks import Ranks
from gradwatch.engine import Engine
from gradwatch.engine.backward import asks_backward, drops_micro
from gradwatch.engine.rules_fit import described
from gradwatch.engine.unfit import Refusal
from gradwatch.errors import AttachError, TrainingStopped
from gradwatch.incidents.bundle.asked import refused_snapshots, snapshots
from gradwatch.reading.device import capturing
from gradwatch.records.finding import Finding
from gradwatch.records.snapshot import Decision, Event, Record, RunInfo, Sites, Snapshot, Verdict
from gradwatch.rules.model import RuleSet
from gradwatch.runtime.health import Health
from gradwatch.runtime.process import here
from gradwatch.session.binding.backward_rules import module_bounds_of
from gradwatch.session.binding.bindings import Courses
from gradwatch.session.binding.fitting import Fitting, refused_here
from gradwatch.session.binding.rank_rules import wants
from gradwatch.session.boundary import Boundary
from gradwatch.session.bundles import Bundles
from gradwatch.session.causes import Causes, localising
from gradwatch.session.deferred import Measured
from gradwatch.session.publish import Publishing
from gradwatch.session.settings import Settings, check_directory, run_info, sink_specs
from gradwatch.session.step import Judging
from gradwatch.sinks import Sink, make_sink
from gradwatch.sinks.breaker import Breaker
from gradwatch.taps.pipeline import PipelineStages

MOST_NAMED = 5
FAILURES = 3  # faults of ours in a row before watching pauses
PAUSE_SECONDS = 60.0
IN_GRAPH = (
    "a step captured in a CUDA graph is left alone: no hook runs when it is replayed, so it is not watched"
)
BLIND = (
    "parameters joined the model and have no optimizer that is watched, so nothing is known of their gradients; "
    "give them to the optimizer (add_param_group, or a new one)"
)
OFF = (
    "{}: off, since there is nothing for them to judge, while all other rules protect; `optional: true` in the rule "
    "file silences this, --strict-rules (strict_rules=True) refuses it"
)
NO_OPTIMIZER = "no optimizer steps {}: gradients are observed only, and no action is carried out"
NO_LOSS = "rules on the loss have no value for such a step: {}; give them one with observe(loss=…)"
STEP_PATH = ("capture", "boundary", "engine")  # a broken tap must not blind the rest
REPORTED = (*STEP_PATH, "action", "precision", "modules", "norm_local", "ranks", "localise")


_ordinal = itertools.count()  # of watches, attached or not: ranks that run one script count alike


class Loop:
    """Capture, rules, actions and sinks put together, and what the hooks ask of them (`session.protocol.Judge`)."""

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
        self._fitting = Fitting(origin == "launcher" and not settings.strict_rules)
        self._loose = loose
        self.health = Health(on_first=self._say_once)
        self.statistics = RunningStatistics(self.models, self._say_once)
        self.weights = Weights(
            lambda: zip(self._capture.names, self._capture.params, strict=False),
            lambda: self._capture.unmoved(),
        )
        self._strict = settings.strict
        self._closed = not active
        self._on_escalate = on_escalate
        self._said_blind = self._said_no_loss = self._said_no_optimizer = False
        self._given = [weakref.ref(optimizer) for optimizer in optimizers]
        self._named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._failures = 0
        self._discarded = Discarded()
        self.pauses = 0
        self._captured = False
        # The process served: none before every part is there (another thread may train while this one attaches).
        self._serving = 0
        self._causes: Causes | None = None
        self._bundles: Bundles | None = None
        self._paused_until = 0.0
        run = run_info(ruleset, Engine(ruleset).rule_infos, settings)
        self.run: RunInfo = placed(run, named=settings.run_id is not None) if active else run
        self._publishing = Publishing()
        self._sinks: list[Breaker] = self._publishing.sinks
        self._number = next(_ordinal)
        self._judge_by(ruleset)
        if active:
            self._attach(models, optimizers, settings, sinks)

    def _judge_by(self, ruleset: RuleSet) -> None:
        """Make all that asks the rules; before anything is attached."""
        self.ruleset = ruleset
        engine, publishing = Engine(ruleset, self.run.rank), self._publishing
        name = f"{self.run.attempt}/{self._number}"
        self._engine = engine
        self.run = replace(self.run, rules=engine.rule_infos)
        self._ranks = Ranks(name, wants(engine), self.models, self._of_ranks, lambda: self._stages.taken())
        self._courses = Courses(engine, self._ranks, self, publishing)
        self._judging = Judging(engine, self._ranks, self, self._courses, publishing)

    def _attach(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        settings: Settings,
        sinks: Sequence[Sink] | None,
    ) -> None:
        self._fit(refused_snapshots(self.ruleset))
        specs = sink_specs(self.ruleset, settings, self.run.rank)
        if sinks is None and any(spec.kind == "journal" for spec in specs):
            check_directory(settings.run_root(self.ruleset))
        chosen = [make_sink(spec.kind, spec.options) for spec in specs] if sinks is None else list(sinks)
        self._wanted = [weakref.ref(optimizer) for optimizer in optimizers]
        self._capture = Capture(models, self._backward_ended, self.failed, self._waiting)
        self._capture.add_loose(self._loose)
        self._capture.cleared = self._cleared
        self._capture.losses.refused = self._no_loss
        self._taps: ModuleTaps | None = None
        self._flat = FlatTaps((), self._capture.hear, self.failed)
        try:
            if not self._capture.hears and not self._capture.lazy_names():
                raise AttachError(
                    "no parameter of the model wants a gradient, so there is nothing to watch; "
                    "attach after unfreezing it (requires_grad_)"
                )
            self._taps = self._fitting.taps(self._engine, models, self.failed)
            self._flat = FlatTaps(models, self._capture.hear, self.failed)
            wanted = [param for param in self._capture.params if param.requires_grad]
            sites = self._all_sites()
            self._fit(refused_here(self._engine, sites, models, wanted, self.run.world_size))
            self._engine.check(sites, settings.strict_rules)
        except BaseException:
            if self._taps is not None:
                self._taps.close()
            self._flat.close()
            self._capture.close()
            raise
        if self._taps is not None:
            self._taps.bounds = module_bounds_of(self.ruleset, self.failed, self.health.report)
            self._courses.module_bounds = self._taps.bounds
        self._courses.listen(local_taps(wanted, self._capture.models()))
        keeps = bool(snapshots(self.ruleset))
        if keeps or localising(
            self.ruleset
        ):  # before the boundary listens: a recorded step ends before it is judged
            self._causes = Causes(self.ruleset, models, self.owns, self.failed, self.run.rank)
        for component in REPORTED:
            self.health.mark(component, True)
        if keeps and self._causes is not None:
            self._bundles = Bundles(self.ruleset, self._causes, self.failed, self.run)
            chosen.append(self._bundles)
        self._sinks += [Breaker(sink, self.health, strict=self._strict) for sink in chosen]
        for sink in self._sinks:  # before the boundary listens: a thread that trains may step at any moment
            sink.open(self.run)
        for sink in self._sinks:
            moved = getattr(sink.sink, "moved", "")
            if moved:
                self._say_once(sink.name, AttachError(moved))
        self._note_inactive()
        self._boundary = Boundary(self._capture, self)
        self._stages = PipelineStages(self._stage_scaled)
        self._before_clip = BeforeClip(self._capture, self._waiting, self.bound, self.resting, self.failed)
        self._serving = self.run.pid

    def _fit(self, refusals: list[Refusal]) -> None:
        """Go on without what is refused; raise `UnfitRulesError` unless that may be."""
        fitted = self._fitting.without(refusals, self.ruleset)
        if fitted is not self.ruleset:
            self._judge_by(fitted)

    def _catch_up(self) -> None:
        """Judge what was put off; not in a forked child, nor in a thread that may race the one that trains."""
        if not self._closed and here[0] == self.run.pid and self._boundary.is_here():
            self._boundary.settle_deferred()

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive; the watch closes itself when there is none."""
        return [] if self._closed else self._capture.models()

    # -- for the boundary (session/protocol.py) ---------------------------------------------------------------

    def bound(self, lane: Lane) -> None:
        """Bind the rules to a lane that was made or whose parameters changed; baselines go on by name."""
        lane.solitary = False
        if lane.without_optimizer and not self._said_no_optimizer:
            self._said_no_optimizer = True
            names = shortened(lane.sites.names)
            self._say_once("capture", AttachError(NO_OPTIMIZER.format(names)))
        self._catch_up()  # what waits was measured on the parameters as they were
        if self._capture.replaced:
            self._capture.drop_dead()
        modules = () if self._taps is None or lane.index else self._taps.names
        self._courses.bind(lane, modules, local_taps(lane.params, self._capture.models()))
        self._note_inactive()
        self._judging.meet()

    def measure(self, lane: Lane, window: Window) -> Measured:
        """Read the extra columns of this step; the result assembles, judges and publishes it."""
        return self._judging.measure(lane, window, None if lane.index else self._taps)

    def forget(self, lane: Lane) -> None:
        """Nothing that tensor hooks heard since the lane's last Snapshot belongs to a step."""
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

    def causes(
        self, lane: Lane, snapshot: Snapshot, verdict: Verdict, decision: Decision
    ) -> tuple[Finding, ...]:
        """What made the gradients of this step's incidents what they are, where a rule wants to know."""
        if self._causes is None or lane.inside_backward or lane.without_optimizer:
            return ()
        late = lane.step != snapshot.step
        return self._causes.of(verdict, decision, snapshot, late, self._ranks.judging_together(lane))

    def kept(self, lane: Lane, record: Record) -> Record:
        """Have what this step was made of copied where a rule wants a bundle; the Record as it is followed."""
        return record if self._bundles is None else self._bundles.take(lane, record)

    def resting(self) -> bool:
        """Whether nothing is watched now: closed, not attached yet, a forked child, a pause after faults of ours."""
        return here[0] != self._serving or (self._paused_until > 0 and self._pausing())

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is watched: named at attach, or it owns a watched parameter."""
        if self.resting():
            return False
        if self._capture.lane_of(optimizer) is not None:
            return True
        if optimizer in self._named or any(ref() is optimizer for ref in self._wanted):
            return True
        return self._capture.holds(optimizer)

    def needs_host(self, lane: Lane) -> bool:
        """Whether some rule acts on this very step, and no device can decide it alone."""
        # A device knows only its own rank's part of a pooled norm.
        return self._engine.acts_on_host or self._ranks.talks(lane) or self._courses.moved_to_step(lane)

    def pooled(self, lane: Lane) -> bool:
        """Whether the ranks put together what each knows of these gradients."""
        return self._ranks.pooled(lane)

    def arrive(self, lane: Lane | None) -> None:
        """A step boundary begins."""
        if lane is not None and not self._closed and here[0] == self.run.pid:
            self._courses.at_boundary(lane)
            self._ranks.arrive(lane)

    def depart(self, lane: Lane | None) -> None:
        """A step boundary ends; no rank is left waiting for this one."""
        if lane is not None and not self._closed and here[0] == self.run.pid:
            self._ranks.depart(lane)

    def enter(self, lane: Lane) -> None:
        """The ranks meet at the first boundary of a lane, and its rules are bound to what they know together."""
        if self._ranks.enter(lane):
            self._stages.look()
            self.bound(lane)
        lane.solitary = self._ranks.leave_alone(lane) and self._courses.by_lane[lane.index].micro is None

    def skips_nonfinite(self, lane: Lane) -> bool:
        """Whether some rule skips non-finite steps."""
        return self._engine.skips_nonfinite

    def max_norm(self, lane: Lane) -> float | None:
        """The standing clip of the rule file; None without one."""
        return self._courses.by_lane[lane.index].bound.max_norm

    def clips_again(self, lane: Lane, norms: NDArray[np.float64]) -> Decision:
        """What the standing clips ask of one more gradient of a step that has been judged."""
        return self._judging.clips_again(lane, norms)

    def captured(self) -> None:
        """A step was captured in a CUDA graph, and nothing of it was touched: said once, and no fault."""
        if not self._captured:
            self._captured = True
            self.health.report("capture", AttachError(IN_GRAPH))

    def failed(self, component: str, error: BaseException) -> None:
        """Count a fault of ours; three in a row on the step path pause it for a minute. Raises if strict,
        and what a signal handler of the script raised."""
        if isinstance(error, TrainingStopped):
            raise error
        self.health.report(component, error)
        if component in STEP_PATH:
            self._failures += 1
        if self._failures >= FAILURES:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._failures = 0
            self.pauses += 1
            self.health.mark(component, False)
        if self._strict:
            raise error

    def judged(self) -> None:
        """A step was judged without a fault."""
        self._failures = 0

    def acted(self, lane: Lane, decision: Decision, error: Exception | None) -> None:
        """What was really done of a decision; its Record is published now."""
        try:
            self._judging.acted(lane, decision, error)
            if error is not None:
                self._ranks.did_otherwise(lane)
        except Exception as fault:  # a stop must not be lost for it
            self.health.report("action", fault)

    def escalated(self, event: Event) -> bool:
        """Call the user's `on_escalate`; its faults are counted, but for `TrainingStopped`, which stops training."""
        if self._on_escalate is None:
            return False
        try:
            with torch.enable_grad():
                self._on_escalate(event)
        except TrainingStopped:
            return True
        except Exception as error:
            self.failed("on_escalate", error)
        return False

    def remark(self, lane: Lane) -> None:
        """A few marks did not tell the truth about this lane: put every mark back."""
        lane.ambiguous = True
        self._capture.restore(lane)

    def _bind_early(self) -> None:
        """Hooks that act inside the backward are there for the first one, where the optimizer is known."""
        if asks_backward(self.ruleset) or drops_micro(self.ruleset):
            for optimizer in self._waiting():
                lane = self._capture.adopt(optimizer)
                lane.born = False  # it hears its window from the first backward on
                self.bound(lane)

    # -- inside ------------------------------------------------------------------------------------------

    def _of_ranks(self, component: str, error: BaseException) -> None:
        """Something about the other ranks: told, but no fault of ours that would pause anything."""
        self.health.report(component, error)
        self.health.mark(component, not self._ranks.alone)

    def _backward_ended(self, told: list[Lane]) -> None:
        if self.resting():
            return
        lanes = self._capture.lanes
        for lane in lanes:
            if not lane.on_cpu and capturing():
                return  # a read of ours would become part of the user's CUDA graph, or break it
        self._courses.backward_ended()
        for lane in lanes:
            if lane.index not in self._courses.by_lane:
                self.bound(lane)
        for lane in told:  # the gradients of others may have been clipped since they were read
            if lane.due():
                lane.read()

    def _stage_scaled(self, stage: nn.Module) -> None:
        """The gradients of a pipeline stage are final: read again what its backwards left."""
        if self._closed or self._pausing():
            return
        params = set(map(id, stage.parameters()))
        with torch.no_grad():
            for lane in self._capture.lanes:
                if lane.index in self._courses.by_lane and not params.isdisjoint(lane.param_ids):
                    lane.read()

    def _pausing(self) -> bool:
        """Whether faults of ours have switched the step path off; at the end of a pause it starts afresh."""
        if not self._paused_until:
            return False
        if time.monotonic() < self._paused_until:
            return True
        self._paused_until = 0.0
        for lane in self._capture.lanes:
            lane.discard()
            lane.tainted = True
        for component in STEP_PATH:
            self.health.mark(component, True)
        return False

    def _waiting(self) -> list[Optimizer]:
        """Optimizers named since this was last asked that have no lane yet."""
        if not self._wanted:
            return []
        found = [optimizer for ref in self._wanted if (optimizer := ref()) is not None]
        self._named.update(found)
        self._wanted.clear()
        return [optimizer for optimizer in found if self._capture.lane_of(optimizer) is None]

    def spent(self) -> float:
        """Seconds spent since the last Record: the end of its own boundary, and the backwards since."""
        return self._capture.spent.news()

    def coverage_now(self) -> float:
        """The coverage as of this boundary; a fall is said once, until it is whole again."""
        ratio, missing = self._capture.coverage.ratio, self._capture.coverage.missing
        if missing and not self._said_blind:
            self._say_once("coverage", AttachError(f"{BLIND}: {shortened(missing)}"))
        self._said_blind = bool(missing)
        return ratio

    def _note_inactive(self) -> None:
        """Which rules judge nothing of the model as it is now: to the health, and to the log where one is new."""
        before = self.health.inactive()
        now = {**self._fitting.off, **self._courses.inactive(self._all_sites)}
        if now == before:
            return
        self.health.set_inactive(now)
        news = self._fitting.news()
        if news:
            self._say_once("rules", AttachError(news))
        new = {key: reason for key, reason in now.items() if key not in {*before, *self._fitting.off}}
        if new:
            self._say_once("rules", AttachError(OFF.format("; ".join(described(new, self.ruleset)))))

    def _no_loss(self, reason: str) -> None:
        """A backward whose root is no loss: said once, where a rule needs one."""
        if not self._said_no_loss and "loss" in self._engine.columns and not self.resting():
            self._said_no_loss = True
            self._say_once("loss", AttachError(NO_LOSS.format(reason)))

    def _all_sites(self) -> Sites:
        return with_modules(self._capture.all_sites(), () if self._taps is None else self._taps.names)

    def _say_once(self, component: str, error: BaseException) -> None:
        for breaker in self._sinks:
            say = getattr(breaker.sink, "internal_error", None)
            if say is not None:
                say(component, error)


def shortened(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
