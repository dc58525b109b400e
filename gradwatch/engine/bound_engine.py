"""BoundEngine: rules bound to the sites of one optimizer; it judges steps and decides on actions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.account.rules_without_data import of_condition
from gradwatch.engine.actions.backward_clips import Asked, asked, bounds, module_bounds
from gradwatch.engine.actions.rule_actions import by_rule, orders, rescaled, without_overridden
from gradwatch.engine.baseline_restarts import BaselineRestarts, jumped, warming_up
from gradwatch.engine.clipping.clip_section_factors import Failed
from gradwatch.engine.columns_needed import Needs
from gradwatch.engine.engine_state import EngineState, NewBaselines, empty_state
from gradwatch.engine.fast_path.many_steps import FastBlock, Restarts, active_without_action
from gradwatch.engine.fast_path.one_step import FastPath, FastPathsByStage, Learned
from gradwatch.engine.judge import Step, firing_now, judges
from gradwatch.engine.judged_steps.staggered_judging import NONE_IN_TURN, InTurn, Turns
from gradwatch.engine.reporting.culprit import usual_loss, usual_norms
from gradwatch.engine.rule_plan import NO_BANK, Plan, RulePlan
from gradwatch.engine.snapshot_reader import Reader
from gradwatch.errors import GradwatchError
from gradwatch.policies.norm_bound import Bound
from gradwatch.records.columns import OF_SCALER, OTHER_RULES, RUNNING_STATISTICS
from gradwatch.records.decision import Decision
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.records.verdict import Due, Verdict
from gradwatch.rules.rule_set import Rule


def raised(error: Exception) -> None:
    """Raise the error of a policy: the default where no `failed` is given that counts it."""
    raise error


class BlockVerdict(NamedTuple):
    """Steps judged together.

    `state` is the state after them, `verdicts` has the verdict of each, `in_turn` the staggered series judged at each.
    """

    state: EngineState
    verdicts: Sequence[Verdict] = ()
    in_turn: Sequence[InTurn] = ()


UNCLIPPED = Decision()
"""The decision on a step on which no rule acts and `clip:` does nothing yet."""

SKIPS_NOT_LEARNED = 10
"""In a row, of a rule that sets itself no limit: as many as `skip_step` has by default (`max_consecutive`)."""


class BoundEngine:
    """Rules bound to sites: `evaluate` and `decide` are pure; `init` and `adopt` make the states they work on."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self._size = len(plan.sites)
        self.clipping = plan.clipping
        self.max_norm = plan.clipping.max_norm
        self.clips_from = plan.clipping.from_step
        facts = [number for number, one in enumerate(plan.rules) if one.detector.finiteness]
        # A loss is not finite with its gradients more often than alone: those are asked first.
        self._facts = tuple(sorted(facts, key=lambda number: plan.rules[number].series.column == "loss"))
        self._fast_paths = FastPathsByStage(plan, frozenset(facts))
        self.turns = Turns((one.series, one.detector.columns) for one in plan.rules)
        self._every_step = Decision(
            max_norm=self.max_norm, elementwise=bool(self.clipping.elementwise) and self.clipping.at == "step"
        )
        self._of_scaler = tuple(n for n, one in enumerate(plan.rules) if one.series.column in OF_SCALER)
        self._of_loss = tuple(n for n in self._facts if plan.rules[n].series.column == "loss")
        self.restarts = BaselineRestarts(plan)
        self._suspending = plan.suspending
        conditions = {one.number for one in plan.conditions}
        self._others = tuple(n for n in range(len(plan.rules)) if n not in conditions.union(facts))

    @property
    def sites(self) -> Sites:
        """The sites, carrying the rule file's label groups."""
        return self.plan.sites

    @property
    def needs(self) -> Needs:
        """The columns the capture must read, and at which steps."""
        return self.plan.needs

    @property
    def inactive(self) -> Mapping[str, str]:
        """By rule id, the reason why a rule of the file judges nothing on these sites."""
        return self.plan.inactive

    @property
    def judging(self) -> frozenset[str]:
        """The ids of the rules that judge something on these sites."""
        return frozenset(one.rule.id for one in self.plan.rules)

    def warming_up(self, state: EngineState) -> dict[str, str]:
        """Rules that cannot judge yet: by id, how many samples the fullest of their baselines has, in words."""
        found = {
            rule: why for rule, why in warming_up(self.plan, state).items() if rule not in self.restarts.warm
        }
        for condition in self.plan.conditions:
            waiting = sorted(rule for rule in map(self._id, condition.of) if rule in found)
            if waiting:
                found[self._id(condition.number)] = of_condition(waiting, found)
        return found

    def _id(self, number: int) -> str:
        return self.plan.rules[number].rule.id

    def init(self) -> EngineState:
        """The state of a run that has not taken a step."""
        return empty_state(self.plan)

    def adopt(self, state: EngineState, previous: BoundEngine | None = None) -> EngineState:
        """The state carried over to these sites and rules by name; what is new starts empty.

        `previous` is the engine that the state belongs to: rules that were warm there count as having had data here.
        """
        if previous is not None:
            self.restarts.go_on_from(previous.restarts, state)
        after = EngineState.from_dict(state.to_dict(), self.plan)
        none = tuple(np.zeros(bank.size, np.bool_) for bank in self.plan.banks)
        return replace(after, begun_anew=tuple(NewBaselines(one.reason, none) for one in state.begun_anew))

    def evaluate(self, state: EngineState, snapshot: Snapshot) -> tuple[Verdict, EngineState]:
        """Judge one step. Pure.

        Rules on NaN, Inf and overflow come first: no baseline learns from a step that is skipped for them. A
        provisional Snapshot is judged by these rules only. A step that the GradScaler rejected
        (`scalars["scaler_skip"]` is not 0) is judged only by the rules on the scaler and by those on a loss that is not
        finite, unless it is Inf; for all others it did not happen.

        Raises GradwatchError if the Snapshot or the state has other sites.
        """
        if state.plan is not self.plan or len(snapshot.norm) != self._size:
            raise GradwatchError("state or snapshot belongs to other sites; use adopt()")
        in_turn = self.turns.in_turn(snapshot.step, state.overdue)
        rejected = bool(snapshot.scalars.get("scaler_skip"))
        judge = self._rejected if rejected else self._judged
        verdict, after = judge(state, snapshot, in_turn)
        if not in_turn:
            return verdict, after
        judged = not (rejected or snapshot.provisional)
        overdue = self.turns.missed(in_turn, snapshot, state.overdue, judged)
        return verdict, after.with_turns(in_turn if judged else NONE_IN_TURN, overdue)

    def _judged(self, state: EngineState, snapshot: Snapshot, in_turn: InTurn) -> tuple[Verdict, EngineState]:
        """A step that counts: at a glance where that is enough."""
        lr = snapshot.scalars.get("lr", state.lr)
        first, end, unreached = state.stage
        if (
            state.active is not None
            and first <= snapshot.step < end
            and not snapshot.provisional
            and not jumped(state.lr, lr)
        ):
            path: FastPath | None = self._fast_paths[unreached][state.active]
            if not state.unjudged <= unreached and self._is_known(state, snapshot, in_turn):
                path = None
            learned = None if path is None else path.learn(state, snapshot, in_turn)
            if path is not None and learned is not None:
                if path.active_every_step or state.ordinary is None:
                    judged = self._active_alone(state, path.active_every_step, learned, lr)
                    return judged or self._rule_by_rule(state, snapshot, in_turn, lr)
                return state.ordinary, state.with_learned(learned.baselines, lr)
        return self._rule_by_rule(state, snapshot, in_turn, lr)

    def evaluate_many(
        self,
        state: EngineState,
        snapshots: Sequence[Snapshot],
        norm: NDArray[np.float32],
        anew: Sequence[int] = (),
    ) -> BlockVerdict:
        """Judge the first of several steps together, as far as they are certainly ordinary.

        The result is bit for bit that of `evaluate` on one after the other; the step after these is for `evaluate`. No
        Snapshot may be provisional, and every gradient must have arrived; `norm` float32[T, P] are their norms. A rule
        without `do` may go on firing on the same series. Of a state that has just been loaded no step is known to be
        ordinary. `anew` are the positions, in order, of the steps that are the first of another optimizer: each is
        judged as after `BaselineRestarts.for_another_optimizer`.

        Raises GradwatchError if a Snapshot or the state has other sites.
        """
        if state.plan is not self.plan or any(len(one.norm) != self._size for one in snapshots):
            raise GradwatchError("state or snapshot belongs to other sites; use adopt()")
        first, end, unreached = state.stage
        path: FastPath | None = None if state.active is None else self._fast_paths[unreached][state.active]
        firing = None if path is None else active_without_action(state, path.active_every_step)
        if path is None or firing is None or state.may_act:
            return BlockVerdict(state)
        lr, in_turn = state.lr, list[InTurn]()
        for t, snapshot in enumerate(snapshots):
            before, lr = lr, snapshot.scalars.get("lr", lr)
            turn = self.turns.in_turn(snapshot.step, state.overdue)
            missed = turn and self.turns.missed(turn, snapshot, state.overdue) is not state.overdue
            known = not state.unjudged <= unreached and self._may_be_known(state, snapshot, turn)
            known = known or not first <= snapshot.step < end
            unknown = t in anew and not self.restarts.blind_anew <= state.unjudged
            if missed or known or unknown or jumped(before, lr):
                break
            in_turn.append(turn)
        usual = len(in_turn)
        restarts = Restarts(anew, self.restarts.of_lr.keys(), self.restarts.without_rate) if anew else None
        block = FastBlock(path, snapshots[:usual], in_turn, norm[:usual], firing, restarts)
        count, baselines = block.leading_ordinary(state) if in_turn else (0, state.baselines)
        if not count:
            return BlockVerdict(state)
        lr = next((one.scalars["lr"] for one in reversed(snapshots[:count]) if "lr" in one.scalars), state.lr)
        after = state.with_learned(baselines, lr)
        if in_turn[count - 1] or state.overdue:
            after = after.with_turns(in_turn[count - 1], state.overdue)
        return BlockVerdict(after, block.verdicts(state, count), in_turn[:count])

    def _active_alone(
        self, state: EngineState, active: Sequence[int], learned: Learned, lr: float | None
    ) -> tuple[Verdict, EngineState] | None:
        """A step on which only rules that are pending or firing have anything to judge.

        None where one of them stops to fire that has suspended others: these are to be judged on this step.
        """
        step = Step(state, learned.reader, self.rank)
        for number, result in learned.results.items():
            step.banks[number] = result
        for number in active:
            if self.plan.rules[number].series.column != OTHER_RULES:
                step.judge(number)
        suspending = self._suspending.intersection(active)
        if any(state.tracks[one].firing.any() and not step.tracks[one].firing.any() for one in suspending):
            return None
        if self.plan.conditions:
            step.judge_conditions()
        return step.finish(state.baselines if self._is_an_outlier(step) else learned.baselines, lr)

    def _rejected(
        self, state: EngineState, snapshot: Snapshot, in_turn: InTurn
    ) -> tuple[Verdict, EngineState]:
        """A step that the GradScaler rejected: its gradients are the scaler's own affair, a loss of NaN is not."""
        judged = (*(self._of_loss if snapshot.loss_without_scale_known else ()), *self._of_scaler)
        if not judged:
            return Verdict(firing_now(state)), state
        step = Step(state, Reader(snapshot, in_turn, self.plan.roots), self.rank)
        step.begin_anew(state.begun_anew)
        if step.stage.unreached:
            step.resolve_unreached()
        baselines = step.learn(state.baselines, learning=True, only=OF_SCALER)
        for number in judged:
            step.judge(number)
        step.judge_conditions(judged)
        return step.finish(baselines, state.lr, by_all=False)

    def _rule_by_rule(
        self, state: EngineState, snapshot: Snapshot, in_turn: InTurn, lr: float | None
    ) -> tuple[Verdict, EngineState]:
        """Facts first, then what is learned, then all others."""
        baselines = state.baselines
        step = Step(state, Reader(snapshot, in_turn, self.plan.roots), self.rank)
        step.begin_anew(state.begun_anew)
        if step.stage.unreached:
            step.resolve_unreached()
        for number in self._facts:
            step.judge(number)
        if not snapshot.provisional:
            if jumped(state.lr, lr):
                baselines = self.restarts.after_rate_jump(state)
            learned = step.learn(baselines, learning=not self._will_skip(step))
            for number in self._others:
                step.judge(number)
            step.judge_conditions()
            return step.finish(baselines if self._is_an_outlier(step) else learned, lr)
        step.judge_conditions(self._facts)
        return step.finish(baselines, lr, by_all=False)

    def _may_be_known(self, state: EngineState, snapshot: Snapshot, in_turn: InTurn) -> bool:
        """True if a rule that conditions are about has something to judge at last, unless it is warming up."""
        reader = Reader(snapshot, in_turn, self.plan.roots)
        for one in map(self.plan.rules.__getitem__, state.unjudged - state.stage.unreached):
            sample = None if snapshot.step % one.judged_every else reader.sample(one.series)
            if sample is not None and sample.present.any():
                return True
        return False

    def _is_known(self, state: EngineState, snapshot: Snapshot, in_turn: InTurn) -> bool:
        """True if a rule that conditions are about judges on this step what it never has."""
        reader, plan = Reader(snapshot, in_turn, self.plan.roots), self.plan
        return any(
            judges(one, plan, reader, () if one.bank == NO_BANK else state.baselines[one.bank])
            for one in map(plan.rules.__getitem__, state.unjudged - state.stage.unreached)
            if snapshot.step % one.judged_every == 0
        )

    def _will_skip(self, step: Step) -> bool:
        """True if a fact leads to a skip, of its own or of its ladder."""
        rules = (self.plan.rules[number] for number in self._facts)
        return bool(step.acting) and any(_skips(step, one) for one in rules)

    def _is_an_outlier(self, step: Step) -> bool:
        """True if a rule keeps the step from the optimizer, and has not done so for long.

        What is kept out is not learned either, or the second of two spikes would be measured by the first. Where it
        goes on for longer than the rule's `max_consecutive`, it is how things are now, and is learned, or else no step
        would ever be taken again.
        """
        return bool(step.acting) and any(
            _skips(step, one) and acted <= (one.max_consecutive or SKIPS_NOT_LEARNED)
            for one, acted in zip(self.plan.rules, step.consecutive, strict=True)
        )

    @property
    def asked(self) -> Asked:
        """Actions that may be done inside the backward, with their sites."""
        return asked(self.plan)

    def bounds(self, state: EngineState, step: int) -> tuple[Bound, ...]:
        """The bounds on the norms of parameters' gradients, for the hooks of the next backward, of `step` or later."""
        return bounds(self.plan, state, step)

    def module_bounds(self, state: EngineState, step: int) -> tuple[Bound, ...]:
        """The bounds on the gradients that modules pass on, for the hooks of the next backward, of `step` or later."""
        return module_bounds(self.plan, state, step)

    def decide(
        self, state: EngineState, verdict: Verdict, snapshot: Snapshot, failed: Failed = raised
    ) -> tuple[Decision, EngineState]:
        """Join the orders that follow from a verdict over all rules; also gives the state that has learned from them.

        `state` is the one that `evaluate` gave for this Snapshot. The policies of `clip:` hold on every step; a
        non-finite norm gets the factor 1 (`gradwatch.policies`). `failed` is called with the error of a policy; without
        it the error is raised.
        """
        decision = self._every_step if snapshot.step >= self.clips_from else UNCLIPPED
        if verdict.acting or verdict.standing:
            for number, one in by_rule(self.plan, verdict.acting):
                due = verdict.due.get(one.rule.id, Due(np.zeros(len(one.shown), np.bool_)))
                decision |= orders(one, due, state.consecutive[number], snapshot, self.plan)
            for _, one in by_rule(self.plan, verdict.standing):
                decision |= rescaled(one, verdict.standing[one.rule.id], snapshot)
            decision = without_overridden(decision)
        return self.clip(decision, state, snapshot, failed) if self.clipping.policies else (decision, state)

    def clip(
        self, decision: Decision, state: EngineState, snapshot: Snapshot, failed: Failed = raised
    ) -> tuple[Decision, EngineState]:
        """The decision with the factors of the policies of `clip:`, and the state that has learned from this step.

        No policy learns from a step that is skipped, rejected by the GradScaler or provisional. `failed` is called with
        the error of a policy, which then does nothing on this step; without it the error is raised.
        """
        if not self.clipping.policies or snapshot.scalars.get("scaler_skip"):
            return decision, state
        # Else the hooks have done it, or it is to begin later.
        at_step = self.clipping.at == "step" and snapshot.step >= self.clips_from
        coef = self.clipping.coefficients(state.clips, snapshot, failed) if at_step else None
        decision = decision if coef is None else decision | Decision(coef=coef)
        if decision.skip or snapshot.provisional:
            return decision, state
        return decision, replace(state, clips=self.clipping.learn(state.clips, snapshot, failed))

    def again(self, state: EngineState, snapshot: Snapshot, failed: Failed = raised) -> Decision:
        """The clip of one more gradient of a step that has been judged (a later closure call); no state changes."""
        if self.clipping.at == "backward" or snapshot.step < self.clips_from:
            return UNCLIPPED  # the hooks have done it, or it is to begin later
        coef = self.clipping.coefficients(state.clips, snapshot, failed) if self.clipping.policies else None
        return self._every_step if coef is None else self._every_step | Decision(coef=coef)

    def fallback(self, total_norm: float, step: int) -> Decision:
        """The orders that hold without a verdict, if `evaluate` fails at this step.

        These are the bound of `clip:` on the total norm (`clip` adds the other policies), and the skip of a step whose
        `total_norm` is not finite, if a rule asks for that.
        """
        broken = not math.isfinite(total_norm)
        skips = any(
            on_gradients(one.rule) and one.rule.acts and one.skip and step >= one.rule.from_step
            for one in self.plan.rules
        )
        return replace(self._every_step if step >= self.clips_from else UNCLIPPED, skip=broken and skips)

    @property
    def decision_otherwise(self) -> Decision:
        """The decision on a step from `clips_from` on where no rule acts, without factors that depend on its norms."""
        return self._every_step

    def usual_norms(self, state: EngineState) -> dict[str, float]:
        """By parameter name, the usual norm of its gradient, where a rule of kind `spike` has learned one."""
        return usual_norms(self.plan, state.baselines)

    def usual_loss(self, state: EngineState) -> float:
        """The usual loss where a rule of kind `loss_spike` has learned one; NaN elsewhere, or if it is not positive."""
        return usual_loss(self.plan, state.baselines)


def on_gradients(rule: Rule) -> bool:
    """True if a rule is about NaN and Inf in gradients."""
    return rule.kind == "nonfinite" and rule.detect.of not in RUNNING_STATISTICS


def _skips(step: Step, one: RulePlan) -> bool:
    """True if a rule acts on this step, and one of its actions, or a rung of its ladder, skips it."""
    acts = one.rule.mode == "act" and one.rule.id in step.acting
    return acts and (one.skip is not None or "skip_step" in step.due[one.rule.id].climbed)
