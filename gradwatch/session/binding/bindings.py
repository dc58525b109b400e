"""The rules bound to every optimizer of one session: what they have learned, and what is listened to for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradwatch.account.running import RunningTotals
from gradwatch.account.unfed import NOT_COMPARED, Reads
from gradwatch.actions.backward.modules import ModuleBounds
from gradwatch.actions.clip import ClipSection
from gradwatch.actions.drop_micro import MicroDrop
from gradwatch.capture.assemble import with_modules
from gradwatch.capture.columns import sampled
from gradwatch.capture.columns.local import LocalNorms
from gradwatch.capture.columns.sampled import Sampler
from gradwatch.capture.optimizer import OptimizerCapture
from gradwatch.capture.shards import is_shard
from gradwatch.checkpoint import CheckpointHealthTracker
from gradwatch.distributed.ranks import Ranks
from gradwatch.engine import BoundEngine, Engine, EngineState
from gradwatch.engine.backward import asks_backward, at_step, drops_micro
from gradwatch.engine.series import ALWAYS
from gradwatch.errors import AttachError
from gradwatch.records.snapshot import RANK_COLUMNS, Sites
from gradwatch.session.activity import Activity
from gradwatch.session.binding.backward_rules import limiter_of, micro_drop_of, own_sites
from gradwatch.session.binding.optimizer_rules import OptimizerRules, standing_of
from gradwatch.session.binding.rank_rules import WHOLE_ROWS, torn_rows
from gradwatch.session.context import Contexts, OptimizerContext
from gradwatch.taps import grad_scaler

LOCAL = frozenset({"norm_local", "rank_norm"})  # columns made of what tensor hooks hear


class RuleBindings:
    """Binds rules to contexts, and goes through those that have some."""

    def __init__(
        self, engine: Engine, ranks: Ranks, activity: Activity, contexts: Contexts, totals: RunningTotals
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._activity = activity
        self._contexts = contexts
        self._totals = totals
        self._restored: Mapping[str, Any] = {}
        self._early: LocalNorms | None = None
        self.in_backward = bool(asks_backward(engine.ruleset))
        self._drops = drops_micro(engine.ruleset)
        self.module_bounds: ModuleBounds | None = None  # of the tapped modules, sites of the first lane
        self._hears_scale: list[Callable[[], None]] = []
        self.most_parameters = 0  # named in the lanes at one time, each counted once

    def __iter__(self) -> Iterator[OptimizerRules]:
        return iter([ctx.course for ctx in self._contexts if ctx.course is not None])

    def context(self, lane: OptimizerCapture) -> OptimizerContext:
        """The context that a lane's rules are bound in."""
        return self._contexts.of(lane)

    def _of(self, lane: OptimizerCapture) -> OptimizerRules | None:
        """The rules bound to a lane's optimizer; None where none are yet."""
        ctx = self._contexts.find(lane)
        return None if ctx is None else ctx.course

    # -- what is listened to -----------------------------------------------------------------------------

    def listen(self, wanted: Sequence[Tensor | None]) -> None:
        """Hear local norms, if a rule asks for them, until lanes take them over: the first backward counts too."""
        if self.in_backward or self._drops:
            self._hears_scale.append(grad_scaler.hear_scale(self._scaled))
        several = self._ranks.several and bool(RANK_COLUMNS & self._engine.columns)
        if several or "norm_local" in self._engine.columns:
            self._early = LocalNorms(wanted, self._activity.failed)

    def _scaled(self, scale: Tensor) -> None:
        """A GradScaler has multiplied a loss."""
        for course in self:
            if course.limiter is not None:
                course.limiter.scaled(scale)
            if course.micro is not None:
                course.micro.scaled()
        if self.module_bounds is not None:
            self.module_bounds.scaled(scale)

    def backward_ended(self) -> None:
        """What tensor hooks heard of a backward, or did in it, counts."""
        for course in self:
            if course.limiter is not None:
                course.limiter.backward_ended()
        if self._early is not None:
            for local in [self._early, *(course.local for course in self)]:
                if local is not None:
                    local.backward_ended()

    def forget(self, lane: OptimizerCapture) -> None:
        """Nothing that tensor hooks heard since the lane's last Snapshot belongs to a step."""
        course = self._of(lane)
        if course is not None and course.local is not None:
            course.local.forget()
        if course is not None and course.limiter is not None:
            course.limiter.forget()

    def cleared(self, lane: OptimizerCapture) -> None:
        """What tensor hooks heard of backwards whose gradients somebody cleared belongs to no step."""
        course = self._of(lane)
        if course is not None and course.local is not None:
            course.local.cleared()
        if course is not None and course.limiter is not None:
            course.limiter.forget()

    def close(self) -> None:
        """Remove the tensor hooks."""
        for local in [self._early, *(course.local for course in self)]:
            if local is not None:
                local.close()
        for course in self:
            for hooks in (course.limiter, course.micro):
                if hooks is not None:
                    hooks.close()
        while self._hears_scale:
            self._hears_scale.pop()()

    # -- binding -----------------------------------------------------------------------------------------

    def bind(
        self, lane: OptimizerCapture, modules: tuple[str, ...], taps: Sequence[Tensor | None]
    ) -> OptimizerContext:
        """Bind the rules to a lane and its tapped modules; baselines go on by name. The context they are bound in."""
        ctx = self._contexts.of(lane)
        sites = with_modules(self._ranks.sites(lane, ctx.seat), modules)
        sites = self._ranks.with_ranks(ctx.seat, sites)
        before, moved = ctx.course, ctx.clips_at_step_instead
        alike = before is not None and sites.alike(before.bound.sites)
        if before is not None and alike and not moved:  # an optimizer after another
            bound, state = before.bound, before.state
        else:
            bound = (self._at_step if moved else self._engine).bind(sites)
            state = bound.init() if before is None else bound.adopt(before.state, before.bound)
        local = self._local(bound, taps, before)
        sampler = Sampler(bound.needs.only(sampled.COLUMNS))
        critical = frozenset(one.rule.id for one in bound.plan.rules if one.rule.severity == "critical")
        vitals = CheckpointHealthTracker(critical)
        if before is not None:
            vitals.carry_on(before.vitals)
        course = ctx.course = OptimizerRules(bound, state, bound.sites, sampler, local, vitals, lane)
        if not alike:
            self._count_parameters()
        if self.in_backward and not lane.without_optimizer:
            self._limit(course, lane, taps, before)
        if self._drops and not lane.without_optimizer:
            course.micro = self._micro(lane, before)
        course.standing = self._standing(lane, bound) if bound.clipping else None
        if before is None or bound is not before.bound:
            apart = self._of_ranks() if lane.without_optimizer and self._ranks.several else {}
            self._totals.unfed.bind(lane.index, {**apart, **reads_of(bound)})
        self._restore(lane)
        self.publish_bounds(course)
        return ctx

    def _of_ranks(self) -> dict[str, Reads]:
        """The rules that compare ranks, which have nothing to read in a loop without an optimizer."""
        rules = (rule for rule in self._engine.ruleset.rules if rule.enabled)
        return {
            rule.id: Reads(rule.detect.columns[0], why=NOT_COMPARED)
            for rule in rules
            if RANK_COLUMNS.intersection(rule.detect.columns)
        }

    def _local(
        self, bound: BoundEngine, taps: Sequence[Tensor | None], before: OptimizerRules | None
    ) -> LocalNorms | None:
        """Local norms, where a rule asks for them; the hooks before them hand over what they heard."""
        former = self._early if before is None or before.local is None else before.local
        local = LocalNorms(taps, self._activity.failed, former) if bound.needs.columns & LOCAL else None
        if former is not None and former is not self._early:
            former.close()
        return local

    def _limit(
        self,
        course: OptimizerRules,
        lane: OptimizerCapture,
        taps: Sequence[Tensor | None],
        before: OptimizerRules | None,
    ) -> None:
        """Hooks that act inside the backward, unless they have switched themselves off."""
        activity, acted = self._activity, None if before is None else before.limiter
        if acted is not None and acted.off:
            acted.close()
            acted.forget()
            course.limiter = acted  # what it would do is done at the step
        else:
            course.limiter = limiter_of(
                self._engine.ruleset, course.bound, lane, taps, activity.failed, activity.health.report, acted
            )
        course.own = own_sites(course.bound, lane)
        lane.heard = None if course.limiter is None else course.limiter.heard

    def _micro(self, lane: OptimizerCapture, before: OptimizerRules | None) -> MicroDrop | None:
        """What tells the micro-batches of a lane apart, kept while it is of this lane."""
        micro, activity = None if before is None else before.micro, self._activity
        if micro is not None and micro.is_of(lane):
            return micro
        if micro is not None:
            micro.close()
        return micro_drop_of(
            self._engine.ruleset, lane, activity.failed, activity.health.report, self.cleared
        )

    def publish_bounds(self, course: OptimizerRules) -> None:
        """What the next backward has to keep to, as far as hooks can see to it."""
        if course.limiter is not None and course.own is not None:
            own = course.own
            course.limiter.publish(tuple(one.at(own) for one in course.bound.bounds(course.state)))
        if self.module_bounds is not None and course.lane.index == 0:
            self.module_bounds.publish(course.bound.module_bounds(course.state))

    def _standing(self, lane: OptimizerCapture, bound: BoundEngine) -> ClipSection | None:
        """What `clip:` asks of this lane's gradients; not what rows sharded since the attach cannot bear."""
        clipping, names = bound.clipping, lane.sites.names
        place = {name: site for site, name in enumerate(bound.sites.names)}
        torn = [k for k, param in enumerate(lane.params) if clipping.elementwise and is_shard(param)]
        refused = torn_rows(clipping, bound.sites, [place[names[k]] for k in torn])
        if refused:
            self._activity.failed("action", AttachError(f"{refused}; {WHOLE_ROWS}"))
        return standing_of(clipping, [place[name] for name in names], names, torn)

    @functools.cached_property
    def _at_step(self) -> Engine:
        """The rules with nothing left to do in the backward but between modules."""
        return Engine(at_step(self._engine.ruleset), self._engine.rank)

    def move_to_step(self, ctx: OptimizerContext) -> None:
        """What hooks in the backward do no more is done at the step from this one on."""
        course = ctx.rules
        bound = self._at_step.bind(course.bound.sites)
        course.state = bound.adopt(course.state, course.bound)
        course.bound, course.sites = bound, bound.sites
        course.standing = self._standing(ctx.lane, bound) if bound.clipping else None

    def inactive(self, everything: Callable[[], Sites]) -> dict[str, str]:
        """Why a rule (by id) or a group (`group:NAME`) judges nothing; not those that are `optional`.

        `everything` gives the sites of the whole model. Rules about ranks are known once a lane is bound.
        """
        if not self._engine.may_miss:
            return {}
        found = self._engine.unmatched(everything())
        lanes = [course.bound.inactive for course in self]
        for rule in self._engine.ruleset.rules:
            if rule.enabled and not rule.optional and RANK_COLUMNS.intersection(rule.detect.columns):
                reasons = [inactive.get(rule.id, "") for inactive in lanes]
                if reasons and all(reasons):
                    found[rule.id] = reasons[0]
        return found

    def begun(self) -> list[OptimizerRules]:
        """Those of optimizers that have stepped, or that there is something to say of; all where none has.

        An optimizer that another one wraps, and that never steps itself, holds nothing back.
        """
        found = list(self)
        begun = [
            course
            for course in found
            if course.record is not None
            or course.vitals.now.last_healthy_step is not None
            or not course.vitals.now.healthy
        ]
        return begun or found

    def warming_up(self) -> dict[str, str]:
        """The rules whose every baseline is still warming up, in all lanes, with how far the best of them is."""
        lanes = [course.bound.warming_up(course.state) for course in self.begun()]
        shared = set(lanes[0]).intersection(*lanes[1:]) if lanes else set()
        return {rule: lanes[0][rule] for rule in sorted(shared)}

    def _count_parameters(self) -> None:
        named = (zip(course.sites.names, course.sites.kinds, strict=True) for course in self)
        found = {name for sites in named for name, kind in sites if kind == "param"}
        self.most_parameters = max(self.most_parameters, len(found))

    def rebaseline(self, glob: str) -> None:
        """Start the baselines of parameters whose names match `glob` afresh, in every optimizer."""
        for course in self:
            course.state = course.bound.rebaseline(course.state, glob)
            self.publish_bounds(course)

    # -- states ------------------------------------------------------------------------------------------

    def saved(self, lanes: Iterable[OptimizerCapture]) -> dict[str, Any]:
        """The state of every lane, JSON-safe, by its index."""
        found = dict(self._restored)  # loaded, and not taken up by a step yet
        for lane in lanes:
            course = self._of(lane)
            if course is not None:
                found[str(lane.index)] = {
                    "step": lane.step,
                    "engine": course.state.to_dict(),
                    "checkpoint": course.vitals.to_dict(),
                }
        return found

    def load(self, saved: Mapping[str, Any], lanes: Iterable[OptimizerCapture]) -> None:
        """Go on from what `saved` gave; lanes that do not exist yet take theirs when they are bound."""
        self._restored = dict(saved)
        for lane in lanes:
            self._restore(lane)

    def _restore(self, lane: OptimizerCapture) -> None:
        saved = self._restored.get(str(lane.index))
        course = self._of(lane)
        if saved is None or course is None:
            return
        course.state = EngineState.from_dict(saved["engine"], course.bound)
        course.vitals.load(saved.get("checkpoint"))
        self.publish_bounds(course)
        lane.step = int(saved["step"])
        self._restored = {key: value for key, value in self._restored.items() if key != str(lane.index)}


def reads_of(bound: BoundEngine) -> dict[str, Reads]:
    """What each rule bound to a lane reads, and at which steps, by rule."""
    return {
        one.rule.id: Reads(
            one.series.source, one.rule.every, one.series.source in ALWAYS, one.detector.finiteness
        )
        for one in bound.plan.rules
    }
