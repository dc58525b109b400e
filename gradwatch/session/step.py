"""From a window to its Record: one step of one optimizer measured, judged, published."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.actions.apply import left_by_zeroing
from gradwatch.actions.clip import Found, carried_scale
from gradwatch.capture.assemble import Extras, as_float32, assemble, of_norms
from gradwatch.capture.columns.loss import without_scale
from gradwatch.capture.columns.modules import ModuleTaps
from gradwatch.capture.columns.sampled import Sampled
from gradwatch.capture.optimizer import Lane
from gradwatch.capture.window import Window
from gradwatch.checkpoint import joined
from gradwatch.detectors.detector import Column
from gradwatch.distributed.ranks import Ranks, Shared
from gradwatch.engine import Engine
from gradwatch.engine.actions import settled
from gradwatch.engine.outcome import factors_of, reshaped, told, unclipped
from gradwatch.engine.permissions import permitted
from gradwatch.errors import AttachError, GradwatchError
from gradwatch.reading.device import arrived, is_ready, kept
from gradwatch.records.snapshot import (
    RANK_COLUMNS,
    SCALAR_COLUMNS,
    CheckpointHealth,
    Decision,
    Order,
    Record,
    Snapshot,
    Verdict,
)
from gradwatch.session.binding.bindings import Courses
from gradwatch.session.binding.optimizer_rules import CALM, CALM_AGAIN, Clock, Course
from gradwatch.session.deferred import Measured
from gradwatch.session.publish import Publishing
from gradwatch.session.services import Surroundings

MEASURED = frozenset({*get_args(Column), *SCALAR_COLUMNS, *RANK_COLUMNS}) - {"loss"}
"""Names that no observed value may take."""
UNJUDGED = Verdict()
"""Stands for the verdict of a step on which the engine failed."""
NOTHING = Extras()
"""Of a step on which nothing was measured but norms."""


class Case(NamedTuple):
    """A step being judged: this rank's window, the same as all ranks see it, and what was found before any decision."""

    lane: Lane
    course: Course
    window: Window
    shared: Shared
    found: Snapshot

    @property
    def rejected(self) -> bool:
        """Whether a GradScaler keeps this step from the optimizer."""
        return bool(self.shared.values.get("scaler_skip"))


class Judging:
    """Judges the steps of every lane by the rules bound to it, and tells the sinks."""

    def __init__(
        self, engine: Engine, ranks: Ranks, around: Surroundings, courses: Courses, publishing: Publishing
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._around = around
        self._courses = courses
        self._publishing = publishing
        self._scalars: dict[str, tuple[int, Any]] = {}
        self._observed = 0
        self._acts_on_jumps = any(rule.acts and rule.kind == "jump" for rule in engine.ruleset.rules)
        # Where no rule acts but on non-finite gradients, a calm step needs no verdict before it is taken; a clip of
        # the total needs none either (`Acting.clip_ahead`). Bounds for the next backward are made of this step.
        self._may_wait = not engine.acts_on_host and engine.clips_only_total and not courses.in_backward

    def observe(self, name: str, value: float | Tensor) -> None:
        """Keep a one-per-step value for the next step of every lane.

        Raises `AttachError` for the name of something that gradwatch measures itself: it would stand in its place.
        """
        if name in MEASURED:
            raise AttachError(
                f"observe({name}=…) is not used: gradwatch measures {name!r} itself; choose another name"
            )
        self._observed += 1
        self._scalars[name] = (self._observed, kept(value))

    def checkpoint(self) -> CheckpointHealth:
        """Whether a checkpoint saved now is one to go back to, as of the last step and the last look."""
        return joined(course.vitals.now for course in self._courses.begun())

    def look(self) -> CheckpointHealth:
        """The same after a look at the weights as they are now, which waits for a device."""
        try:
            ruin = self._around.weights.look()
        except Exception as error:
            self._around.failed("checkpoint", error)
            ruin = (f"the weights could not be looked at ({type(error).__name__})",)
        self._seen(ruin, self._steps())
        if not self._courses.by_lane:
            return CheckpointHealth(not ruin, None, ruin)
        return self.checkpoint()

    def meet(self) -> None:
        """An optimizer is about to move parameters for the first time: know what they were like."""
        try:
            self._around.weights.meet()
        except Exception as error:
            self._around.failed("checkpoint", error)

    def _glance(self, course: Course, broken: bool) -> None:
        """Look at the weights where a step that jumped has been taken, or nobody has looked for a while."""
        urgent = broken and not course.vitals.now.reasons
        for one in self._courses.by_lane.values():
            urgent = urgent or one.vitals.suspected is not None
        try:
            found = self._around.weights.glance(self._steps, urgent)
        except Exception as error:
            self._around.failed("checkpoint", error)
            return
        if found is not None:
            self._seen(found[1], found[0])

    def _steps(self) -> dict[int, int]:
        """The last step taken, by lane."""
        return {index: course.lane.step - 1 for index, course in self._courses.by_lane.items()}

    def _seen(self, ruin: tuple[str, ...], steps: Mapping[int, int]) -> None:
        for index, course in self._courses.by_lane.items():
            if index in steps:
                course.vitals.seen(ruin, steps[index])
        if not ruin and self.checkpoint().healthy:
            self._around.weights.renew()

    def records(self) -> list[Record]:
        """The latest Record of every lane."""
        return [course.record for course in self._courses if course.record is not None]

    # -- a step ------------------------------------------------------------------------------------------

    def measure(self, lane: Lane, window: Window, taps: ModuleTaps | None) -> Measured:
        """Read the extra columns of this step; the result assembles, judges and publishes it."""
        course = self._courses.by_lane[lane.index]
        if course.limiter is not None:
            course.limiter.settle(window)
            if course.limiter.off and course.bound.asked:
                self._courses.move_to_step(lane)
        if course.micro is not None:
            course.micro.settle(window)
        optimizer = lane.optimizer() if lane.optimizer is not None else None
        params: list[Sampled] = []
        if course.sampler.wanted and window.step not in course.sampler.idle:
            sampled = course.sampler.collect(window.step, lane.params, lane.grads, window.left)
            params += [] if sampled is None else [sampled]
        scale = 1.0 if window.loss_scale is None else window.loss_scale
        if course.local is not None:
            params.append(course.local.collect(scale))
        modules = []
        if taps is not None:
            modules.append(taps.collect(window.step, scale))
        scalars = self._unseen(course) if self._observed > course.observed else {}
        if window.loss is not None and "loss" not in scalars:
            scalars["loss"] = without_scale(window.loss, window.loss_scale)
        if lane.without_optimizer:
            scalars["observed_only"] = 1.0
        if optimizer is not None:
            lr = optimizer.param_groups[0].get("lr", 0.0)
            scalars["lr"] = lr if type(lr) is float else kept(lr)  # of a capturable one, without waiting
        if window.skipped is not None:
            scalars["scaler_skip"] = window.skipped
        if window.calm:
            finite = True
            for value in scalars.values():
                finite = finite and type(value) is float and math.isfinite(value)
            window.calm = (
                finite
                and self._may_wait
                and course.calm >= CALM
                and window.loss_scale is None
                and window.skipped is None
                and not (params or modules or course.sampler.awaiting)
                and (lane.solitary or not self._ranks.talks(lane))
            )
        extras = Extras(tuple(params), tuple(modules)) if params or modules else NOTHING
        at = self._clock(course)

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

    def _judge(
        self,
        lane: Lane,
        course: Course,
        window: Window,
        extras: Extras,
        scalars: Mapping[str, Any],
        at: Clock,
    ) -> Decision:
        """What is decided of a window; a fault of ours does not make this rank part from the others.

        Where it knows the numbers that they judge, it looks again, at the norms alone: rules and policies on norms
        decide and learn as theirs do. What cannot be had so: rules on other columns (`max_abs`, ranks) miss this
        step here; an engine that fails (`_ask`) leaves the standing clips and the skip of non-finite gradients,
        and its baselines miss the step. And plain replicas, which tell each other nothing, cannot hear
        of a fault before there is a window to look at (in `Lane.settle`): the others clip that step, this one not.
        """
        course.decided = None
        try:
            decision = self._decided(lane, course, window, extras, scalars, at)
            self._courses.publish_bounds(course)
            return decision
        except Exception as error:
            course.vitals.unjudged(lane.step)
            values = {name: arrived(value) for name, value in scalars.items()}
            shared = self._ranks.norms_alone(lane, window, values)
            if shared is None and self._ranks.several:
                raise  # the other ranks cannot know what this one would do
            self._around.failed("boundary", error)
            if shared is None:
                return course.decided or course.bound.fallback(window.total())
            lane.reduced_total = shared.total_applied
            return course.decided or self._second_look(lane, course, window, shared, at)

    def _second_look(self, lane: Lane, course: Course, window: Window, shared: Shared, at: Clock) -> Decision:
        """What is decided by the norms alone; by their total alone, should that fail too."""
        try:
            found = of_norms(lane.index, course.sites, shared.window, shared.values)
            return self._conclude(Case(lane, course, window, shared, found), at)
        except Exception as error:
            self._around.failed("boundary", error)
            course.vitals.unjudged(lane.step)
            return course.decided or course.bound.fallback(shared.window.total())

    def _decided(
        self,
        lane: Lane,
        course: Course,
        window: Window,
        extras: Extras,
        scalars: Mapping[str, Any],
        at: Clock,
    ) -> Decision:
        """Judge a window as all ranks see it, and publish what came of it."""
        values = {name: arrived(value) for name, value in scalars.items()}
        shared = self._ranks.share(lane, window, extras, values)
        if shared is None:  # the other ranks' part of these numbers is missing
            return Decision()
        lane.reduced_total = shared.total_applied
        sites, coverage = course.sites, self._around.coverage_now()
        found = assemble(lane.index, sites, shared.window, shared.extras, shared.values, coverage)
        return self._conclude(Case(lane, course, window, shared, found), at)

    def _conclude(self, case: Case, at: Clock) -> Decision:
        """Decide of a Snapshot, foresee what that makes of it, and publish both."""
        self._publishing.release(case.course)  # left by a boundary that failed
        self._glance(case.course, not math.isfinite(case.found.total_norm))
        lane, course, window, shared, found = case = self._with_confirmed(case)
        # Where some rank has no facts it learns nothing: what others learned now would part them later.
        verdict, decision = (UNJUDGED, Decision()) if shared.blind else self._ask(course, found)
        course.decided = decision.at(shared.own)  # the engine has learned this step, and must not do so again
        decision = self._permitted(case, verdict, decision)
        course.decided = decision.at(shared.own)
        decision, snapshot = self._foreseen(case, decision)
        self._note_move(case, decision)
        self._note_calm(case, verdict, snapshot)
        course.vitals.spoilt = self._around.statistics.spoilt(not math.isfinite(found.total_norm))
        health = course.vitals.after(found, verdict, decision, judged=verdict is not UNJUDGED)
        self._publishing.totals.unjudged += verdict is UNJUDGED
        findings = self._around.causes(lane, snapshot, verdict, decision)
        record = self._around.kept(lane, Record(snapshot, verdict, decision, *at, health, findings))
        self._publishing.give(course, record, found, window.at_hand)
        return decision.at(shared.own)

    def _with_confirmed(self, case: Case) -> Case:
        """With what the weights have confirmed of an earlier step: this rank's own, so not where the rule acts."""
        confirmed = case.course.vitals.confirmed()
        if not confirmed or self._acts_on_jumps:
            return case
        return case._replace(found=replace(case.found, scalars={**case.found.scalars, **confirmed}))

    def _permitted(self, case: Case, verdict: Verdict, decision: Decision) -> Decision:
        """What is to be done in the end: with the word of the user's callback, without what is refused here."""
        if verdict.events:
            decision = self._climbed(verdict, decision)
        return permitted(
            decision,
            agreed=case.shared.may_act,
            empty=case.window.empty,
            inside_backward=case.lane.inside_backward,
            without_optimizer=case.lane.without_optimizer,
            scaled=case.found.loss_scale is not None,
            report=self._around.health.report,
        )

    def _foreseen(self, case: Case, decision: Decision) -> tuple[Decision, Snapshot]:
        """The Snapshot as the decision will leave it, and the decision with a word for the policies of `clip:`."""
        found = snapshot = case.found
        if decision.touches:
            total = case.shared.window.total_applied()
            left: dict[int, float] = {}
            zeroed: dict[int, float] = {}
            done = decision.skip or decision.stop or case.rejected or not case.window.at_hand
            talks = self._ranks.talks(case.lane)
            if decision.zero is not None and not (talks or done):
                zeroed = left_by_zeroing(case.lane.grads(), decision.zero[case.shared.own])
                total = case.lane.total_applied(zeroed)
                found = replace(found, total_norm_applied=total)
            if decision.elementwise and not done:
                decision, left = self._measured_ahead(case, decision, total)
            snapshot = reshaped(found, decision, total, {} if talks else left, zeroed)
        inside = case.course.bound.clipping.at == "backward" and self._engine.ruleset.clip is not None
        if decision.touches or inside:
            decision = told(decision, unclipped(found) if inside else found, snapshot)
        return decision, snapshot

    def _note_move(self, case: Case, decision: Decision) -> None:
        """Which weights this step is going to move, where a sampled column compares them."""
        window, sampler = case.window, case.course.sampler
        if sampler.awaiting:
            moved = (window.calls > 0) & (case.found.norm[case.shared.own] > 0)
            moved &= not (decision.skip or case.rejected)
            sampler.moved(moved, window.step)

    def _note_calm(self, case: Case, verdict: Verdict, snapshot: Snapshot) -> None:
        """Whether the marks told the truth, and how long nothing has been out of the usual."""
        lane, course, window = case.lane, case.course, case.window
        if lane.thinned and not window.trusted and window.repeats is not None:
            self._around.remark(lane)
        unusual = verdict.events or verdict.breaching or case.shared.window.details or snapshot.provisional
        if unusual or course.state.quiet is None:
            course.calm = CALM - CALM_AGAIN if course.calm >= CALM - CALM_AGAIN else 0
        else:
            course.calm += 1
        calm = self._may_wait and course.calm >= CALM and not self._ranks.talks(lane)
        # Between the last totals: one step out of two that differs must not make the next one unusual as well.
        before = lane.usual or snapshot.total_norm
        lane.usual = math.sqrt(before * snapshot.total_norm) if calm else None

    def clips_again(self, lane: Lane, norms: NDArray[np.float64]) -> Decision:
        """What `clip:` asks of gradients of these `norms[K]`, made after those that this step was judged by."""
        course = self._courses.by_lane[lane.index]
        own = len(norms)
        norm, calls = np.zeros(len(course.sites), np.float32), np.zeros(len(course.sites), np.int32)
        norm[:own], calls[:own] = as_float32(norms), norms > 0
        total = math.sqrt(np.dot(norms, norms))
        found = Snapshot(lane.index, lane.step, course.sites, norm, calls, np.ones_like(norm), total, total)
        return course.bound.again(course.state, found, self._policy_failed).at(slice(0, own))

    def acted(self, lane: Lane, done: Decision, error: Exception | None) -> None:
        """What was decided of a lane's step is done, or was not, because of `error`; its Record is published now."""
        self._publishing.acted(self._courses.by_lane[lane.index], done, error)

    def _measured_ahead(
        self, case: Case, decision: Decision, total: float
    ) -> tuple[Decision, dict[int, float]]:
        """The norms that elementwise policies will leave; the decision without them where they are refused."""
        lane, own = case.lane, case.shared.own
        norms: Sequence[float] = case.shared.window.resolve()[1][own].tolist()  # sync: numpy
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
            decision, course.state = course.bound.decide(state, verdict, snapshot, self._policy_failed)
        except Exception as error:
            self._around.failed("engine", error)
            return UNJUDGED, self._unjudged(course, snapshot)
        self._around.judged()
        return verdict, decision

    def _unjudged(self, course: Course, snapshot: Snapshot) -> Decision:
        """What holds without a verdict: as the other ranks are about to do, who have the same numbers and no fault."""
        alone = course.bound.fallback(snapshot.total_norm)
        decision, course.state = course.bound.clip(alone, course.state, snapshot, self._policy_failed)
        return decision

    def _policy_failed(self, error: Exception) -> None:
        """A policy of `clip:` is at fault; the verdict, the skip and the other policies are not its to cost."""
        self._around.failed("action", error)

    def _climbed(self, verdict: Verdict, decision: Decision) -> Decision:
        """The decision after the user's callback has heard of the rungs reached on this step: it may want a stop."""
        for event in verdict.events:
            if event.kind == "escalated" and event.actions and self._around.escalated(event):
                stop = Decision(stop=True, orders=frozenset({Order(event.rule, "stop")}))
                decision = settled(decision | stop)
        return decision
