"""From a window to its Record: one step of one optimizer measured, judged, published."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.backward_rules import limiter_of, micro_drop_of, own_sites
from gradwatch.checkpoint import Vitals, joined
from gradwatch.course import CALM, Clock, Course, reshaped, standing_of, told, unclipped
from gradwatch.engine import BoundEngine, Engine, EngineState
from gradwatch.engine.actions import settled
from gradwatch.engine.backward import asks_backward, at_step, drops_micro
from gradwatch.errors import AttachError, GradwatchError
from gradwatch.finding import Finding
from gradwatch.health import Health
from gradwatch.hooks import precision, sampling
from gradwatch.hooks.assemble import Extras, assemble, with_modules
from gradwatch.hooks.deferred import Measured
from gradwatch.hooks.device import arrived, is_ready, kept
from gradwatch.hooks.lane import Lane
from gradwatch.hooks.local import LocalNorms
from gradwatch.hooks.module_bounds import ModuleBounds
from gradwatch.hooks.modules import ModuleTaps
from gradwatch.hooks.ranks import Ranks
from gradwatch.hooks.sampling import Sampled, Sampler
from gradwatch.hooks.shards import is_shard
from gradwatch.hooks.standing import Found, StandingClips, carried_scale, factors_of
from gradwatch.hooks.window import Window
from gradwatch.publishing import Publishing
from gradwatch.rank_rules import torn_rows
from gradwatch.sinks.breaker import Breaker
from gradwatch.snapshot import (
    RANK_COLUMNS,
    CheckpointHealth,
    Decision,
    Event,
    Order,
    Record,
    Snapshot,
    Verdict,
)

UNJUDGED = Verdict()
"""Stands for the verdict of a step on which the engine failed."""
LOCAL = frozenset({"norm_local", "rank_norm"})  # columns made of what tensor hooks hear
OBSERVED = "refused: an optimizer that steps inside backward has moved the weights before it can be judged"
SCALED = (
    "zero_nonfinite refused under a GradScaler: it would hide the overflow by which the scaler finds its scale, which "
    "would then stay too high for ever; the scaler skips such steps by itself"
)
NOT_ALONE = (
    "refused: the ranks could not agree on this step, and one rank acting alone would part from the rest"
)


class Surroundings(Protocol):
    """What judging asks of the Watch it belongs to."""

    health: Health

    def failed(self, component: str, error: BaseException) -> None:
        """Count a fault of ours."""

    def judged(self) -> None:
        """A step was judged without a fault."""

    def escalated(self, event: Event) -> bool:
        """A rung of a rule's ladder was reached: tell the user's callback; whether it wants training stopped."""

    def spent(self) -> float:
        """Seconds that watching has cost since the last Record."""

    def coverage_now(self) -> float:
        """The coverage as of this boundary, 0..1."""

    def remark(self, lane: Lane) -> None:
        """A few marks did not tell the truth about this lane: put every mark back."""

    def causes(
        self, lane: Lane, snapshot: Snapshot, verdict: Verdict, decision: Decision
    ) -> tuple[Finding, ...]:
        """What made the gradients of this step's incidents what they are, where a rule wants to know."""


class Judging:
    """The rules bound to every lane of one Watch, what they have learned, and the sinks they tell."""

    def __init__(self, engine: Engine, ranks: Ranks, around: Surroundings) -> None:
        self._publishing = Publishing()
        self._engine = engine
        self._ranks = ranks
        self._around = around
        self._courses: dict[int, Course] = {}
        self._restored: Mapping[str, Any] = {}
        self._scalars: dict[str, tuple[int, Any]] = {}
        self._observed = 0
        self._early: LocalNorms | None = None
        self._in_backward = bool(asks_backward(engine.ruleset))
        # Where no rule acts but on non-finite gradients, a calm step needs no verdict before it is taken; a clip of
        # the total needs none either (`Acting.clip_ahead`). Bounds for the next backward are made of this step.
        self._drops = drops_micro(engine.ruleset)
        self._may_wait = not engine.acts_on_host and engine.clips_only_total and not self._in_backward
        self.module_bounds: ModuleBounds | None = None  # of the tapped modules, sites of the first lane
        self._hears_scale: list[Callable[[], None]] = []

    @property
    def sinks(self) -> list[Breaker]:
        """Where Records go."""
        return self._publishing.sinks

    def at_boundary(self, lane: Lane | None) -> None:
        """A step boundary begins: the gradients of a step are about to be measured."""
        course = None if lane is None else self._courses.get(lane.index)
        if course is not None and course.micro is not None:
            course.micro.at_boundary()

    def knows(self, lane: Lane) -> bool:
        """Whether the rules are bound to a lane."""
        return lane.index in self._courses

    def observe(self, name: str, value: float | Tensor) -> None:
        """Keep a one-per-step value for the next step of every lane."""
        self._observed += 1
        self._scalars[name] = (self._observed, kept(value))

    def checkpoint(self) -> CheckpointHealth:
        """Whether a checkpoint saved now is one to go back to."""
        return joined(course.vitals.now for course in self._courses.values())

    def records(self) -> list[Record]:
        """The latest Record of every lane."""
        return [course.record for course in self._courses.values() if course.record is not None]

    def max_norm(self, lane: Lane) -> float | None:
        """The standing clip of the rule file; None without one."""
        return self._courses[lane.index].bound.max_norm

    # -- what is listened to -----------------------------------------------------------------------------

    def listen(self, wanted: Sequence[Tensor | None]) -> None:
        """Hear local norms, if a rule asks for them, until lanes take them over: the first backward counts too."""
        if self._in_backward or self._drops:
            self._hears_scale.append(precision.hear_scale(self._scaled))
        several = self._ranks.several and bool(RANK_COLUMNS & self._engine.columns)
        if several or "norm_local" in self._engine.columns:
            self._early = LocalNorms(wanted, self._around.failed)

    def _scaled(self, scale: Tensor) -> None:
        """A GradScaler has multiplied a loss."""
        for course in self._courses.values():
            if course.limiter is not None:
                course.limiter.scaled(scale)
            if course.micro is not None:
                course.micro.scaled()
        if self.module_bounds is not None:
            self.module_bounds.scaled(scale)

    def backward_ended(self) -> None:
        """What tensor hooks heard of a backward, or did in it, counts."""
        for course in self._courses.values():
            if course.limiter is not None:
                course.limiter.backward_ended()
        if self._early is not None:
            for local in [self._early, *(course.local for course in self._courses.values())]:
                if local is not None:
                    local.backward_ended()

    def forget(self, lane: Lane) -> None:
        """Nothing that tensor hooks heard since the lane's last Snapshot belongs to a step."""
        course = self._courses.get(lane.index)
        if course is not None and course.local is not None:
            course.local.forget()
        if course is not None and course.limiter is not None:
            course.limiter.forget()

    def cleared(self, lane: Lane) -> None:
        """What tensor hooks heard of backwards whose gradients somebody cleared belongs to no step."""
        course = self._courses.get(lane.index)
        if course is not None and course.local is not None:
            course.local.cleared()
        if course is not None and course.limiter is not None:
            course.limiter.forget()

    def close(self) -> None:
        """Remove the tensor hooks; publish what waits."""
        for course in self._courses.values():
            self._publishing.release(course)
        for local in [self._early, *(course.local for course in self._courses.values())]:
            if local is not None:
                local.close()
        for course in self._courses.values():
            for hooks in (course.limiter, course.micro):
                if hooks is not None:
                    hooks.close()
        while self._hears_scale:
            self._hears_scale.pop()()

    # -- states ------------------------------------------------------------------------------------------

    def bind(self, lane: Lane, modules: tuple[str, ...], taps: Sequence[Tensor | None]) -> None:
        """Bind the rules to a lane and its tapped modules; baselines go on by name."""
        sites = with_modules(self._ranks.sites(lane), modules)
        engine = self._at_step if self.moved_to_step(lane) else self._engine
        bound = engine.bind(self._ranks.with_ranks(lane, sites))
        before = self._courses.get(lane.index)
        state = bound.init() if before is None else bound.adopt(before.state, before.bound)
        needs = bound.needs
        former = self._early if before is None or before.local is None else before.local
        local = None
        if needs.columns & LOCAL:
            local = LocalNorms(taps, self._around.failed, former)
        if former is not None and former is not self._early:
            former.close()
        sampler = Sampler(needs.columns & sampling.COLUMNS, needs.every)
        critical = frozenset(one.rule.id for one in bound.plan.rules if one.rule.severity == "critical")
        vitals = Vitals(critical)
        if before is not None:
            self._publishing.release(before)
            vitals.load(before.vitals.to_dict())
        course = self._courses[lane.index] = Course(bound, state, bound.sites, sampler, local, vitals)
        if self._in_backward:
            ruleset, around = self._engine.ruleset, self._around
            acted = None if before is None else before.limiter
            if acted is not None and acted.off:
                acted.close()
                acted.forget()
                course.limiter = acted  # what it would do is done at the step
            else:
                course.limiter = limiter_of(
                    ruleset, bound, lane, taps, around.failed, around.health.report, acted
                )
            course.own = own_sites(bound, lane)
            lane.heard = None if course.limiter is None else course.limiter.heard
        if self._drops:
            course.micro = None if before is None else before.micro
            if course.micro is not None and not course.micro.is_of(lane):
                course.micro.close()
                course.micro = None
            if course.micro is None:
                ruleset, around = self._engine.ruleset, self._around
                course.micro = micro_drop_of(ruleset, lane, around.failed, around.health.report, self.cleared)
        lane.standing = self._standing(lane, bound) if bound.clipping else None
        self._restore(lane)
        self._publish_bounds(course)

    def _standing(self, lane: Lane, bound: BoundEngine) -> StandingClips | None:
        """What `clip:` asks of this lane's gradients; not what rows sharded since the attach cannot bear."""
        clipping, names = bound.clipping, lane.sites.names
        place = {name: site for site, name in enumerate(bound.sites.names)}
        torn = [k for k, param in enumerate(lane.params) if clipping.elementwise and is_shard(param)]
        refused = torn_rows(clipping, bound.sites, [place[names[k]] for k in torn])
        if refused:
            self._around.failed("action", AttachError(refused))
        return standing_of(clipping, [place[name] for name in names], names, torn)

    @functools.cached_property
    def _at_step(self) -> Engine:
        """The rules with nothing left to do in the backward."""
        return Engine(at_step(self._engine.ruleset), self._engine.rank)

    def moved_to_step(self, lane: Lane) -> bool:
        """Whether hooks that were to clip inside the backward have switched themselves off."""
        course = self._courses.get(lane.index)
        return course is not None and course.limiter is not None and bool(course.limiter.off)

    def _move_to_step(self, lane: Lane, course: Course) -> None:
        """What hooks in the backward do no more is done at the step from this one on."""
        bound = self._at_step.bind(course.bound.sites)
        course.state = bound.adopt(course.state, course.bound)
        course.bound, course.sites = bound, bound.sites
        lane.standing = self._standing(lane, bound) if bound.clipping else None

    def saved(self, lanes: Iterable[Lane]) -> dict[str, Any]:
        """The state of every lane, JSON-safe, by its index."""
        found = dict(self._restored)  # loaded, and not taken up by a step yet
        for lane in lanes:
            course = self._courses.get(lane.index)
            if course is not None:
                found[str(lane.index)] = {
                    "step": lane.step,
                    "engine": course.state.to_dict(),
                    "checkpoint": course.vitals.to_dict(),
                }
        return found

    def load(self, saved: Mapping[str, Any], lanes: Iterable[Lane]) -> None:
        """Go on from what `saved` gave; lanes that do not exist yet take theirs when they are bound."""
        self._restored = dict(saved)
        for lane in lanes:
            self._restore(lane)

    def _restore(self, lane: Lane) -> None:
        saved = self._restored.get(str(lane.index))
        course = self._courses.get(lane.index)
        if saved is None or course is None:
            return
        course.state = EngineState.from_dict(saved["engine"], course.bound)
        course.vitals.load(saved.get("checkpoint"))
        self._publish_bounds(course)
        lane.step = int(saved["step"])
        self._restored = {key: value for key, value in self._restored.items() if key != str(lane.index)}

    # -- a step ------------------------------------------------------------------------------------------

    def measure(self, lane: Lane, window: Window, taps: ModuleTaps | None) -> Measured:
        """Read the extra columns of this step; the result assembles, judges and publishes it."""
        course = self._courses[lane.index]
        if course.limiter is not None:
            course.limiter.settle(window)
            if course.limiter.off and course.bound.asked:
                self._move_to_step(lane, course)
        if course.micro is not None:
            course.micro.settle(window)
        optimizer = lane.optimizer() if lane.optimizer is not None else None
        params: list[Sampled] = []
        if course.sampler:
            sampled = course.sampler.collect(window.step, lane.params, lane.grads, window.left)
            params += [] if sampled is None else [sampled]
        scale = 1.0 if window.loss_scale is None else window.loss_scale
        if course.local is not None:
            params.append(course.local.collect(scale))
        modules = []
        if taps is not None:
            modules.append(taps.collect(window.step, scale))
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
        return Clock(self._around.spent(), None if before is None else now - before, time.time())

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
        course.decided = None
        try:
            decision = self._decided(lane, course, window, extras, scalars, at)
            self._publish_bounds(course)
            return decision
        except Exception as error:
            course.vitals.unjudged(lane.step)
            totals = self._ranks.totals(lane, window)
            if totals is None:
                raise
            self._around.failed("boundary", error)
            lane.reduced_total = totals.applied
            return course.decided or course.bound.fallback(totals.raw)

    def _publish_bounds(self, course: Course) -> None:
        """What the next backward has to keep to, as far as hooks can see to it."""
        if course.limiter is not None and course.own is not None:
            own = course.own
            course.limiter.publish(tuple(one.at(own) for one in course.bound.bounds(course.state)))
        if self.module_bounds is not None and course is self._courses.get(0):
            self.module_bounds.publish(course.bound.module_bounds(course.state))

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
        self._publishing.release(course)  # left by a boundary that failed
        sites, coverage = course.sites, self._around.coverage_now()
        snapshot = assemble(lane.index, sites, shared.window, shared.extras, shared.values, coverage)
        verdict, decision = self._ask(course, snapshot)
        if verdict.events:
            decision = self._climbed(verdict, decision)
        if not shared.may_act and (decision.skip or decision.touches):
            self._around.health.report("action", AttachError(NOT_ALONE))
            decision = decision.withheld()
        if window.empty:
            decision |= Decision(skip=True)
        rejected = bool(shared.values.get("scaler_skip"))
        if lane.inside_backward and decision.acts:
            self._around.health.report("action", AttachError(OBSERVED))
            decision = decision.withheld()
        if decision.zero is not None and snapshot.loss_scale is not None:
            self._around.health.report("action", AttachError(SCALED))
            decision = decision.without_zero()
        plain, course.decided = snapshot, decision.at(shared.own)
        if decision.touches:
            total = shared.window.total_applied()
            left: dict[int, float] = {}
            done = decision.skip or decision.stop or rejected or not window.at_hand
            if decision.elementwise and not done:
                norms = shared.window.resolve()[1][shared.own].tolist()  # sync: numpy
                decision, left = self._measured_ahead(lane, decision, shared.own, total, norms)
            snapshot = reshaped(snapshot, decision, total, {} if self._ranks.talks(lane) else left)
        inside = course.bound.clipping.at == "backward" and self._engine.ruleset.clip is not None
        if decision.touches or inside:
            by_rules = any(order.coefficient is not None and not order.shadow for order in decision.orders)
            decision = told(decision, unclipped(plain) if inside else plain, snapshot, by_rules)
        if course.sampler.expects_move:
            moved = (window.calls > 0) & (snapshot.norm[shared.own] > 0)
            moved &= not (decision.skip or rejected)
            course.sampler.moved(moved, window.step)
        if lane.thinned and not window.trusted and window.repeats is not None:
            self._around.remark(lane)
        unusual = verdict.events or verdict.breaching or shared.window.details or snapshot.provisional
        course.calm = 0 if unusual or course.state.quiet is None else course.calm + 1
        calm = self._may_wait and course.calm >= CALM and not self._ranks.talks(lane)
        lane.usual = snapshot.total_norm if calm else None
        health = course.vitals.after(plain, verdict, decision)
        if verdict is UNJUDGED:
            course.vitals.unjudged(plain.step)
            health = course.vitals.now
        findings = self._around.causes(lane, snapshot, verdict, decision)
        record = Record(snapshot, verdict, decision, *at, health, findings)
        self._publishing.give(course, record, plain, window.at_hand)
        return decision.at(shared.own)

    def acted(self, lane: Lane, done: Decision, error: Exception | None) -> None:
        """What was decided of a lane's step is done, or was not, because of `error`; its Record is published now."""
        self._publishing.acted(self._courses[lane.index], done, error)

    def _measured_ahead(
        self, lane: Lane, decision: Decision, own: Any, total: float, norms: Sequence[float]
    ) -> tuple[Decision, dict[int, float]]:
        """The norms that elementwise policies will leave; the decision without them where they are refused."""
        grads, standing = lane.grads(), lane.standing
        factors = factors_of(decision.at(own), total, len(grads))
        try:
            if standing is not None:
                optimizer = None if lane.optimizer is None else lane.optimizer()
                found = Found(grads, lane.params, arrived(kept(carried_scale(optimizer))))
                return decision, standing.measure(found, factors, norms)
        except GradwatchError as error:  # for a reason that every rank has
            self._around.failed("action", error)
            return replace(decision, elementwise=False), {}
        except Exception as error:  # they are made when they are applied, as on the other ranks
            self._around.failed("action", error)
        return decision, {}

    def _ask(self, course: Course, snapshot: Snapshot) -> tuple[Verdict, Decision]:
        """The engine's verdict; a fault in it costs this step's verdict, not its metrics."""
        try:
            verdict, state = course.bound.evaluate(course.state, snapshot)
            decision, course.state = course.bound.decide(state, verdict, snapshot)
        except Exception as error:
            self._around.failed("engine", error)
            # The other ranks judge the same numbers without this fault: do as they are about to.
            if not self._ranks.several:
                return UNJUDGED, Decision(max_norm=course.bound.max_norm)  # a bound needs no verdict
            alone = course.bound.fallback(snapshot.total_norm)
            decision, course.state = course.bound.clip(alone, course.state, snapshot)
            return UNJUDGED, decision
        self._around.judged()
        return verdict, decision

    def _climbed(self, verdict: Verdict, decision: Decision) -> Decision:
        """The decision after the user's callback has heard of the rungs reached on this step: it may want a stop."""
        for event in verdict.events:
            if event.kind == "escalated" and event.actions and self._around.escalated(event):
                stop = Decision(stop=True, orders=frozenset({Order(event.rule, "stop")}))
                decision = settled(decision | stop)
        return decision
