"""The composition root: the one place where capture, rules, actions and sinks meet and the loop closes."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.course import CALM, Clock, Course, clipped, json_safe
from gradwatch.engine import Engine, EngineState
from gradwatch.errors import AttachError, TrainingStopped
from gradwatch.health import Health
from gradwatch.hooks import sampling
from gradwatch.hooks.assemble import Extras, assemble, with_modules
from gradwatch.hooks.boundary import Boundary
from gradwatch.hooks.capture import Capture
from gradwatch.hooks.clipping import BeforeClip
from gradwatch.hooks.deferred import Measured
from gradwatch.hooks.device import arrived, capturing, is_ready, kept
from gradwatch.hooks.flat import FlatTaps
from gradwatch.hooks.lane import Lane
from gradwatch.hooks.local import LocalNorms
from gradwatch.hooks.modules import COLUMNS as MODULE_COLUMNS
from gradwatch.hooks.modules import ModuleTaps
from gradwatch.hooks.names import named_modules
from gradwatch.hooks.pipeline import PipelineStages
from gradwatch.hooks.placement import placed
from gradwatch.hooks.ranks import Ranks
from gradwatch.hooks.sampling import Sampled, Sampler
from gradwatch.hooks.shards import local_taps
from gradwatch.hooks.window import Window
from gradwatch.rank_rules import check_ranks, wants
from gradwatch.rules import RuleSet
from gradwatch.settings import Settings, run_info, sink_specs
from gradwatch.sinks import Sink, make_sink
from gradwatch.sinks.breaker import Breaker
from gradwatch.snapshot import Decision, Record, RunInfo, Sites, Snapshot, Verdict

FAILURES = 3  # faults of ours in a row before watching pauses
PAUSE_SECONDS = 60.0
IN_GRAPH = (
    "a step captured in a CUDA graph is left alone: no hook runs when it is replayed, so it is not watched"
)
BLIND = (
    "parameters joined the model and have no optimizer that is watched, so nothing is known of their gradients; "
    "give them to the optimizer (add_param_group, or a new one)"
)
OBSERVED = "refused: an optimizer that steps inside backward has moved the weights before it can be judged"
LOCAL = frozenset({"norm_local", "rank_norm"})  # columns made of what tensor hooks hear
STEP_PATH = ("capture", "boundary", "engine")  # a broken tap must not blind the rest
REPORTED = ("capture", "boundary", "engine", "action", "precision", "modules", "norm_local", "ranks")
NOT_ALONE = (
    "refused: the ranks could not agree on this step, and one rank acting alone would part from the rest"
)

_live: list[weakref.ref[Watch]] = []
_ordinal = itertools.count()  # of watches, attached or not: ranks that run one script count alike


def live_watches() -> list[Watch]:
    """Every Watch of this process that has not been closed."""
    return [one for ref in _live if (one := ref()) is not None]


class Watch:
    """A live watch; see `watch`. Attributes: `run` (identity), `health` (our own faults), `ruleset`."""

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        ruleset: RuleSet,
        settings: Settings,
        sinks: Sequence[Sink] | None,
        origin: str,
        active: bool = True,
    ) -> None:
        self.ruleset = ruleset
        self.origin = origin
        self.health = Health(on_first=self._say_once)
        self._strict = settings.strict
        self._closed = not active
        self._courses: dict[int, Course] = {}
        self._scalars: dict[str, tuple[int, Any]] = {}
        self._observed = 0
        self._said_blind = False
        self._last_state: dict[str, Any] = {"version": 1, "lanes": {}}
        self._restored: Mapping[str, Any] = {}
        self._named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._failures = 0
        self._captured = False
        self._paused_until = 0.0
        run = run_info(ruleset, Engine(ruleset).rule_infos, settings)
        self.run: RunInfo = placed(run, named=settings.run_id is not None) if active else run
        self._engine = Engine(ruleset, self.run.rank)
        self._ranks = Ranks(
            f"{self.run.attempt}/{next(_ordinal)}", wants(self._engine), self.models, self._of_ranks
        )
        # Where no rule acts but on non-finite gradients, a calm step needs no verdict before it is taken.
        self._may_wait = not self._engine.acts_on_host and ruleset.clip is None
        self._sinks: list[Breaker] = []
        if active:
            self._attach(models, optimizers, settings, sinks)

    def _attach(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        settings: Settings,
        sinks: Sequence[Sink] | None,
    ) -> None:
        specs = sink_specs(self.ruleset, settings, self.run.rank)
        chosen = [make_sink(spec.kind, spec.options) for spec in specs] if sinks is None else list(sinks)
        self._wanted = [weakref.ref(optimizer) for optimizer in optimizers]
        self._capture = Capture(models, self._backward_ended, self.failed, self._waiting)
        self._taps: ModuleTaps | None = None
        self._early: LocalNorms | None = None
        self._flat = FlatTaps((), self._capture.hear, self.failed)
        try:
            if not self._capture.marked and not self._capture.lazy_names():
                raise AttachError(
                    "no parameter of the model wants a gradient, so there is nothing to watch; "
                    "attach after unfreezing it (requires_grad_)"
                )
            self._taps = self._module_taps(models)
            self._flat = FlatTaps(models, self._capture.hear, self.failed)
            self._engine.check(self._all_sites())
            check_ranks(self._engine, self.run.world_size)
        except BaseException:
            if self._taps is not None:
                self._taps.close()
            self._flat.close()
            self._capture.close()
            raise
        if self._engine.columns & LOCAL:
            # Until a lane takes them over: the first backward counts too.
            wanted = [param for param in self._capture.params if param.requires_grad]
            self._early = LocalNorms(local_taps(wanted, self._capture.models()), self.failed)
        self._boundary = Boundary(self._capture, self)
        self._stages = PipelineStages(self._stage_scaled, self.failed)
        self._before_clip = BeforeClip(self._capture, self._waiting, self.bound, self._resting, self.failed)
        for component in REPORTED:
            self.health.mark(component, True)
        self._sinks = [Breaker(sink, self.health, strict=self._strict) for sink in chosen]
        for sink in self._sinks:
            sink.open(self.run)
        _live.append(weakref.ref(self))
        self._finalizer = weakref.finalize(self, _close_sinks, list(self._sinks), os.getpid())
        _at_exit()
        self._ends_with(models)

    # -- for users ---------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def knows(self, identity: int) -> bool:
        """Whether the parameter with this `id()` is watched here."""
        return not self._closed and self._capture.covers_id(identity)

    def observe(self, **scalars: float | torch.Tensor) -> None:
        """Tell one-per-step values for the rules, e.g. `observe(loss=loss)`; changes and raises nothing.

        Seen by the next `optimizer.step()` of every watched optimizer. A tensor is detached; one on a device
        is read without waiting when the step is judged.
        """
        if self._closed:
            return
        for name, value in scalars.items():
            try:
                self._observed += 1
                self._scalars[name] = (self._observed, kept(value))
            except Exception as error:
                self.failed("observe", error)

    def about_to_clip(self) -> None:
        """Have the gradients read now, before code of your own clips them; changes and raises nothing.

        torch's `clip_grad_*` functions do this by themselves. Other code needs it for the window of an
        accumulating loop that ends early: without it that step is flagged provisional, its norm read too late.
        """
        if not self._closed:
            self._before_clip.read()

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

    def status(self) -> dict[str, Any]:
        """The present state, JSON-safe: run, steps, what is firing, our own errors."""
        self._catch_up()
        records = [course.record for course in self._courses.values() if course.record is not None]
        return {
            "run_id": self.run.run_id,
            "directory": self.run.directory,
            "url": self.url,
            "active": not self._closed,
            "steps": sum(record.snapshot.step + 1 for record in records),
            "total_norm": [json_safe(record.snapshot.total_norm) for record in records],
            "firing": sorted({rule for record in records for rule in record.verdict.firing}),
            "coverage": self.coverage,
            "internal_errors": self.health.errors(),
            "components_up": self.health.up(),
        }

    def add(self, models: Iterable[nn.Module]) -> None:
        """Watch further models in the same run; their optimizers are adopted at their first step."""
        added = list(models)
        self._capture.add_models(added)
        self._ends_with(added)

    def _ends_with(self, models: Iterable[nn.Module]) -> None:
        # torch's step hooks keep a Watch nobody holds (`gradwatch.watch(model)` alone is enough); what ends it
        # is the end of its models.
        for model in models:
            weakref.finalize(model, _model_gone, weakref.ref(self)).atexit = False

    def models(self) -> list[nn.Module]:
        """The watched models that are still alive; the watch closes itself when there is none."""
        return [] if self._closed else self._capture.models()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything seen so far is where it belongs (journal on disk); False if it is not."""
        if self._closed:
            return True
        self._catch_up()
        deadline = time.monotonic() + timeout
        done = [sink.flush(max(0.0, deadline - time.monotonic())) for sink in self._sinks]
        return all(done)

    def state_dict(self) -> dict[str, Any]:
        """Baselines, streaks and step counts, to be saved beside the model's checkpoint."""
        if self._closed:
            return self._last_state
        self._catch_up()
        lanes = dict(self._restored)  # loaded, and not taken up by a step yet
        for lane in self._capture.lanes:
            course = self._courses.get(lane.index)
            if course is not None:
                lanes[str(lane.index)] = {"step": lane.step, "engine": course.state.to_dict()}
        return {"version": 1, "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; parameters that are new start afresh, by name."""
        if state.get("version") != 1:
            raise AttachError(
                f"this state was saved by another version: {state.get('version')!r}, expected 1"
            )
        self._catch_up()
        self._restored = dict(state["lanes"])
        for lane in [] if self._closed else self._capture.lanes:
            self._restore(lane)

    def _catch_up(self) -> None:
        """Judge what was put off, unless this is a forked child, which has no steps of its own."""
        if not self._closed and os.getpid() == self.run.pid:
            self._boundary.settle_deferred()

    def close(self) -> None:
        """Remove every hook, flush and close every sink; model and optimizer are as found. Idempotent."""
        if self._closed:
            return
        try:
            self._last_state = self.state_dict()
        except Exception as error:  # a watch that cannot tell its state must still let go
            self.health.report("close", error)
        locals_ = [course.local for course in self._courses.values()]
        taps = [self._stages, self._taps, self._flat, self._early]
        parts = [self._ranks, self._before_clip, self._boundary, *taps, *locals_, self._capture]
        for part in parts:
            try:
                if part is not None:
                    part.close()
            except Exception as error:  # the others must be given back all the same
                self.health.report("close", error)
        self._closed = True
        self._finalizer()
        _live[:] = [ref for ref in _live if ref() is not None and ref() is not self]

    # -- for the boundary (hooks/boundary.py: Judge) -----------------------------------------------------

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is watched: named at attach, or it owns a watched parameter."""
        if self._closed or os.getpid() != self.run.pid or self._pausing():
            return False
        if self._capture.lane_of(optimizer) is not None:
            return True
        if optimizer in self._named or any(ref() is optimizer for ref in self._wanted):
            return True
        return self._capture.holds(optimizer)

    def bound(self, lane: Lane) -> None:
        """Bind the rules to a lane that was made or whose parameters changed; baselines go on by name."""
        self._capture.drop_dead()
        modules = () if self._taps is None or lane.index else self._taps.names
        sites = with_modules(self._ranks.sites(lane), modules)
        bound = self._engine.bind(self._ranks.with_ranks(lane, sites))
        before = self._courses.get(lane.index)
        state = bound.init() if before is None else bound.adopt(before.state, before.bound)
        needs = bound.needs
        former = self._early if before is None or before.local is None else before.local
        local = None
        if needs.columns & LOCAL:
            local = LocalNorms(local_taps(lane.params, self._capture.models()), self.failed, former)
        if former is not None and former is not self._early:
            former.close()
        sampler = Sampler(needs.columns & sampling.COLUMNS, needs.every)
        self._courses[lane.index] = Course(bound, state, bound.sites, sampler, local)
        self._restore(lane)

    def forget(self, lane: Lane) -> None:
        """Nothing that tensor hooks heard since the lane's last Snapshot belongs to a step."""
        course = self._courses.get(lane.index)
        if course is not None and course.local is not None:
            course.local.forget()

    def needs_host(self, lane: Lane) -> bool:
        """Whether some rule acts on this very step, and no device can decide it alone."""
        # A device knows only its own rank's part of a pooled norm.
        return self._engine.acts_on_host or self._ranks.talks(lane)

    def arrive(self, optimizer: Optimizer) -> None:
        """A step boundary begins."""
        if not self._closed and os.getpid() == self.run.pid:
            self._ranks.arrive(self._capture.lane_of(optimizer))

    def depart(self, optimizer: Optimizer) -> None:
        """A step boundary ends; no rank is left waiting for this one."""
        if not self._closed and os.getpid() == self.run.pid:
            self._ranks.depart(self._capture.lane_of(optimizer))

    def enter(self, lane: Lane) -> None:
        """The ranks meet at the first boundary of a lane, and its rules are bound to what they know together."""
        if self._ranks.enter(lane):
            self._stages.look()
            self.bound(lane)

    def skips_nonfinite(self, lane: Lane) -> bool:
        """Whether some rule skips non-finite steps."""
        return self._engine.skips_nonfinite

    def max_norm(self, lane: Lane) -> float | None:
        """The standing clip of the rule file; None without one."""
        return self._courses[lane.index].bound.max_norm

    def captured(self) -> None:
        """A step was captured in a CUDA graph, and nothing of it was touched: said once, and no fault."""
        if not self._captured:
            self._captured = True
            self.health.report("capture", AttachError(IN_GRAPH))

    def measure(self, lane: Lane, window: Window) -> Measured:
        """Read the extra columns of this step; the result assembles, judges and publishes it."""
        course = self._courses[lane.index]
        optimizer = lane.optimizer() if lane.optimizer is not None else None
        params: list[Sampled] = []
        if course.sampler:
            sampled = course.sampler.collect(window.step, lane.params, lane.grads, window.left)
            params += [] if sampled is None else [sampled]
        scale = 1.0 if window.loss_scale is None else window.loss_scale
        if course.local is not None:
            params.append(course.local.collect(scale))
        modules = []
        if self._taps is not None and lane.index == 0:
            modules.append(self._taps.collect(window.step, scale))
        scalars = self._unseen(course)
        if optimizer is not None:
            scalars |= self._of_optimizer(optimizer)
        if window.skipped is not None:
            scalars["scaler_skip"] = window.skipped
        if window.calm:
            window.calm = (
                self._may_wait
                and course.calm >= CALM
                and window.loss_scale is None
                and window.skipped is None
                and not (params or modules or self._ranks.talks(lane) or course.sampler.expects_move)
                and all(isinstance(value, float) and math.isfinite(value) for value in scalars.values())
            )
        extras, at = Extras(tuple(params), tuple(modules)), self._clock(course)

        def ready() -> bool:
            return window.ready() and extras.ready() and all(map(is_ready, scalars.values()))

        return Measured(ready, lambda: self._judge(lane, course, window, extras, scalars, at))

    def _clock(self, course: Course) -> Clock:
        """When this step is, and what it cost."""
        now = time.perf_counter()
        before, course.last_step = course.last_step, now
        return Clock(self._spent(), None if before is None else now - before, time.time())

    def _unseen(self, course: Course) -> dict[str, Any]:
        """What was observed since this lane's last step; every lane sees every value once."""
        fresh = {name: value for name, (count, value) in self._scalars.items() if count > course.observed}
        course.observed = self._observed
        return fresh

    def _of_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """`lr`; a tensor of a capturable optimizer is read without waiting."""
        return {"lr": kept(optimizer.param_groups[0].get("lr", 0.0))}

    def _judge(
        self,
        lane: Lane,
        course: Course,
        window: Window,
        extras: Extras,
        scalars: Mapping[str, Any],
        at: Clock,
    ) -> Decision:
        """What is decided of a window; a fault of ours does not make this rank part from the others."""
        try:
            return self._decided(lane, course, window, extras, scalars, at)
        except Exception as error:
            totals = self._ranks.totals(lane, window)
            if totals is None:
                raise
            self.failed("boundary", error)
            lane.reduced_total = totals.applied
            return course.bound.fallback(totals.raw)

    def _decided(
        self,
        lane: Lane,
        course: Course,
        window: Window,
        extras: Extras,
        scalars: Mapping[str, Any],
        at: Clock,
    ) -> Decision:
        values = {name: arrived(value) for name, value in scalars.items()}
        shared = self._ranks.share(lane, window, extras, values)
        if shared is None:  # the other ranks' part of these numbers is missing
            return Decision()
        lane.reduced_total = shared.total_applied
        sites, coverage = course.sites, self._coverage()
        snapshot = assemble(lane.index, sites, shared.window, shared.extras, shared.values, coverage)
        verdict, decision = self._ask(course, snapshot)
        if not shared.may_act and (decision.skip or decision.max_norm is not None):
            self.health.report("action", AttachError(NOT_ALONE))
            decision = decision.withheld()
        rejected = bool(shared.values.get("scaler_skip"))
        if lane.inside_backward and (decision.skip or decision.stop or decision.max_norm is not None):
            self.health.report("action", AttachError(OBSERVED))
            decision = decision.withheld()
        if decision.max_norm is not None:
            snapshot = clipped(snapshot, decision, shared.window.total_applied())
        if course.sampler.expects_move:
            moved = (window.calls > 0) & (snapshot.norm[shared.own] > 0)
            moved &= not (decision.skip or rejected)
            course.sampler.moved(moved, window.step)
        if lane.thinned and not window.trusted and window.repeats is not None:
            lane.ambiguous = True
            self._capture.restore(lane)
        unusual = verdict.events or verdict.breaching or shared.window.details or snapshot.provisional
        course.calm = 0 if unusual or course.state.quiet is None else course.calm + 1
        calm = self._may_wait and course.calm >= CALM and not self._ranks.talks(lane)
        lane.usual = snapshot.total_norm if calm else None
        course.record = record = Record(snapshot, verdict, decision, *at)
        for sink in self._sinks:
            sink.write(record)
        if decision.stop:
            self.flush_sinks()
        return decision

    def _ask(self, course: Course, snapshot: Snapshot) -> tuple[Verdict, Decision]:
        """The engine's verdict; a fault in it costs this step's verdict, not its metrics."""
        try:
            verdict, state = course.bound.evaluate(course.state, snapshot)
            decision, course.state = course.bound.decide(state, verdict)
        except Exception as error:
            self.failed("engine", error)
            # The other ranks judge the same numbers without this fault: do as they are about to.
            several = self._ranks.several
            return Verdict(), course.bound.fallback(snapshot.total_norm) if several else Decision()
        self._failures = 0
        return verdict, decision

    def failed(self, component: str, error: BaseException) -> None:
        """Count a fault of ours; three in a row on the step path pause it for a minute. Raises only if strict."""
        if isinstance(error, TrainingStopped):
            raise error
        self.health.report(component, error)
        if component in STEP_PATH:
            self._failures += 1
        if self._failures >= FAILURES:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._failures = 0
            self.health.mark(component, False)
        if self._strict:
            raise error

    # -- inside ------------------------------------------------------------------------------------------

    def flush_sinks(self, timeout: float = 2.0) -> None:
        """Make what was written durable, before training is stopped."""
        deadline = time.monotonic() + timeout
        for sink in self._sinks:
            sink.flush(max(0.0, deadline - time.monotonic()))

    def _of_ranks(self, component: str, error: BaseException) -> None:
        """Something about the other ranks: told, but no fault of ours that would pause anything."""
        self.health.report(component, error)
        self.health.mark(component, not self._ranks.alone)

    def _backward_ended(self) -> None:
        if self._closed or self._pausing():
            return
        if capturing():
            return  # a read of ours would become part of the user's CUDA graph, or break it
        if self._early is not None:  # some rule asks for `norm_local`
            for local in [self._early, *(course.local for course in self._courses.values())]:
                if local is not None:
                    local.backward_ended()
        with torch.no_grad():
            for lane in self._capture.lanes:
                if lane.index not in self._courses:
                    self.bound(lane)
                if lane.backwards and lane.due():
                    lane.read()

    def _stage_scaled(self, stage: nn.Module) -> None:
        """The gradients of a pipeline stage are final: read again what its backwards left."""
        if self._closed or self._pausing():
            return
        params = set(map(id, stage.parameters()))
        with torch.no_grad():
            for lane in self._capture.lanes:
                if lane.index in self._courses and not params.isdisjoint(lane.param_ids):
                    lane.read()

    def _resting(self) -> bool:
        return self._closed or os.getpid() != self.run.pid or self._pausing()

    def _pausing(self) -> bool:
        """Whether faults of ours have switched the step path off; at the end of a pause it starts afresh."""
        if not self._paused_until or time.monotonic() < self._paused_until:
            return bool(self._paused_until)
        self._paused_until = 0.0
        for lane in self._capture.lanes:
            lane.discard()
            lane.tainted = True
        for component in STEP_PATH:
            self.health.mark(component, True)
        return False

    def _waiting(self) -> list[Optimizer]:
        """Optimizers named at attach that have no lane yet."""
        if not self._wanted:
            return []
        found = [optimizer for ref in self._wanted if (optimizer := ref()) is not None]
        self._named.update(found)
        self._wanted.clear()
        return [optimizer for optimizer in found if self._capture.lane_of(optimizer) is None]

    def _spent(self) -> float:
        """Seconds spent since the last Record: the end of its own boundary, and the backwards since."""
        boundary, capture = self._boundary, self._capture
        spent = boundary.spent_seconds + capture.spent_seconds
        boundary.spent_seconds = capture.spent_seconds = 0.0
        return spent

    def _coverage(self) -> float:
        """The coverage as of this boundary; a fall is said once, until it is whole again."""
        ratio, missing = self._capture.coverage.ratio, self._capture.coverage.missing
        if missing and not self._said_blind:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            self._say_once("coverage", AttachError(f"{BLIND}: {listed}"))
        self._said_blind = bool(missing)
        return ratio

    def _restore(self, lane: Lane) -> None:
        saved = self._restored.get(str(lane.index))
        course = self._courses.get(lane.index)
        if saved is None or course is None:
            return
        course.state = EngineState.from_dict(saved["engine"], course.bound)
        lane.step = int(saved["step"])
        self._restored = {key: value for key, value in self._restored.items() if key != str(lane.index)}

    def _module_taps(self, models: list[nn.Module]) -> ModuleTaps | None:
        asked = self.ruleset.modules
        wanted = self._engine.columns & MODULE_COLUMNS
        if asked is None or not wanted:
            return None
        sites = _bare_sites(tuple(name for name, _ in named_modules(models)), "module")
        chosen = np.zeros(len(sites), bool)
        for glob in asked.names:
            chosen |= sites.select(glob)
        pairs = [pair for pair, keep in zip(named_modules(models), chosen, strict=True) if keep]
        if not pairs:
            raise AttachError(f"`modules.names` {list(asked.names)} matches no module of the model")
        return ModuleTaps(pairs, asked.tap, wanted, self.failed)

    def _all_sites(self) -> Sites:
        return with_modules(self._capture.all_sites(), () if self._taps is None else self._taps.names)

    def _say_once(self, component: str, error: BaseException) -> None:
        for breaker in self._sinks:
            say = getattr(breaker.sink, "internal_error", None)
            if say is not None:
                say(component, error)


def _bare_sites(names: tuple[str, ...], kind: str) -> Sites:
    zeros = np.zeros(len(names), np.int64)
    return Sites(names, (kind,) * len(names), zeros, zeros, np.arange(len(names)))


def _close_sinks(sinks: list[Breaker], pid: int) -> None:
    """Runs at `close`, when a Watch is collected, or at exit; never in a forked child."""
    if os.getpid() == pid:
        for sink in sinks:
            sink.close()


@functools.cache
def _at_exit() -> None:
    """At exit, judge what was put off before the sinks are closed: atexit goes backwards."""
    atexit.register(_catch_up_all)


def _catch_up_all() -> None:
    for watch in live_watches():
        watch._catch_up()


def _model_gone(owner: weakref.ref[Watch]) -> None:
    gw = owner()
    if gw is not None and not gw.models():
        gw.close()
