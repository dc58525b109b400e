"""Engine: a rule file ready to judge; BoundEngine: the same, bound to the sites of one optimizer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.account.rules_without_data import of_condition
from gradwatch.detectors import Detector, State
from gradwatch.engine.actions.backward_clips import Asked, asked, bounds, module_bounds, only_in_backward
from gradwatch.engine.actions.rule_actions import by_rule, orders, rescaled, without_overridden
from gradwatch.engine.clip_policy_binding import clips_only_total, needs_host
from gradwatch.engine.columns_needed import Needs, needs_of
from gradwatch.engine.engine_state import EngineState, NewBaselines, empty_state
from gradwatch.engine.fast_path.many_steps import FastBlock, Restarts, active_without_action
from gradwatch.engine.fast_path.one_step import FastPath, FastPaths, Learned
from gradwatch.engine.judge import Step, firing_now, judges
from gradwatch.engine.reporting.culprit import usual_norms
from gradwatch.engine.rule_plan import NO_BANK, Plan, make_plan
from gradwatch.engine.series import Series, labels
from gradwatch.engine.snapshot_reader import Reader
from gradwatch.engine.strictest_clip import Failed
from gradwatch.engine.turns import NONE_IN_TURN, InTurn, Turns
from gradwatch.engine.unmatched_rules import admit, may_miss, refusals, unmatched
from gradwatch.engine.unsupported_rules import Refusal
from gradwatch.errors import GradwatchError
from gradwatch.policies.norm_bound import Bound
from gradwatch.records.columns import OF_SCALER, OTHER_RULES, RUNNING_STATISTICS, is_observed
from gradwatch.records.decision import Decision
from gradwatch.records.run_info import RuleInfo
from gradwatch.records.snapshot import BoolArray, Sites, Snapshot
from gradwatch.records.verdict import Due, Verdict
from gradwatch.rules.impossible_actions import by_what_acts
from gradwatch.rules.rule_set import Rule, RuleSet

LR_JUMP = 3.0
"""A learning rate that changes by more than this factor in a step re-baselines the gradients it steers."""

STEERED_BY_USER = frozenset({"loss", "lr", "loss_scale", "scaler_skip"})
"""Scalars that are not made of gradients: a jump of the learning rate re-baselines neither them nor observed ones."""


def raised(error: Exception) -> None:
    """An error of a policy that is not counted."""
    raise error


class Engine:
    """A rule file ready to be bound to models. Immutable; all memory is in the `EngineState`s it hands out.

    `rank` is only told to annotations (`{rank}`).
    """

    def __init__(self, ruleset: RuleSet, rank: int = 0) -> None:
        self.ruleset = ruleset
        self._clip_needs_host = needs_host(ruleset.clip)
        self.may_miss = may_miss(ruleset)  # whether `unmatched` could ever list anything
        self.rank = rank

    @property
    def rule_infos(self) -> tuple[RuleInfo, ...]:
        """Descriptions of the enabled rules for sinks, by id."""
        return tuple(
            RuleInfo(rule.id, rule.kind, rule.severity, _named(rule), getattr(rule.detect, "of", ""))
            for rule in self._enabled()
        )

    @property
    def columns(self) -> frozenset[str]:
        """Every column that an enabled rule reads, free or not."""
        return frozenset(name for rule in self._enabled() for name in rule.detect.columns)

    def cadences_of(self, columns: AbstractSet[str]) -> frozenset[int]:
        """The cadences of the enabled rules that read any of these columns."""
        return frozenset(
            rule.every for rule in self._enabled() if not columns.isdisjoint(rule.detect.columns)
        )

    @property
    def needs(self) -> Needs:
        """Columns that the enabled rules need, whatever the model."""
        return needs_of(self._enabled())

    @cached_property
    def skips_nonfinite(self) -> bool:
        """True if some rule skips steps with non-finite gradients, as a fused optimizer can on the device."""
        return any(_skips_on_device(rule) for rule in self._enabled())

    @cached_property
    def acts_on_host(self) -> bool:
        """True if some rule or policy acts otherwise, so that norms must be on the host before the step."""
        rules = any(
            rule.acts and not (_skips_on_device(rule) or only_in_backward(self.ruleset, rule.id))
            for rule in self._enabled()
        )
        return rules or self._clip_needs_host

    def acts_by(self, kind: str) -> bool:
        """True if some rule acts by what a rule of this kind says: its own, or one that its condition is about."""
        acting = by_what_acts(self.ruleset)
        return any(rule.kind == kind and rule.id in acting for rule in self._enabled())

    @cached_property
    def clips_only_total(self) -> bool:
        """True if `clip:` asks for nothing, or for nothing but a bound on the total norm at the step."""
        return clips_only_total(self.ruleset.clip)

    def _enabled(self) -> list[Rule]:
        return sorted((rule for rule in self.ruleset.rules if rule.enabled), key=lambda rule: rule.id)

    def check(self, sites: Sites, strict: bool = False) -> None:
        """Raise `UnfitRulesError` unless all that is asked of these sites (all the model's) can be carried out.

        With `strict`, rules and groups that match nothing raise `UnmatchedRulesError`; see `unmatched`.
        """
        admit(self.ruleset, sites, strict)

    def refusals(self, sites: Sites) -> list[Refusal]:
        """Refusals of what cannot be carried out on these sites; what `check` raises for, item by item."""
        return list(refusals(self.ruleset, sites.labelled(labels(self.ruleset.groups, sites))))

    def unmatched(self, sites: Sites) -> dict[str, str]:
        """Reasons, by rule id or group (`group:NAME`), for matching no site here; `optional` ones are left out."""
        return unmatched(self.ruleset, sites.labelled(labels(self.ruleset.groups, sites)))

    def bind(self, sites: Sites) -> BoundEngine:
        """The engine for the sites of one optimizer; a rule that matches none of them is simply inactive."""
        labelled = sites.labelled(labels(self.ruleset.groups, sites))
        return BoundEngine(make_plan(self.ruleset, labelled), self.rank)


class BlockVerdict(NamedTuple):
    """Steps judged together: the state after them, the verdict of each, and of each the staggered series in turn."""

    state: EngineState
    verdicts: Sequence[Verdict] = ()
    in_turn: Sequence[InTurn] = ()


class BoundEngine:
    """Rules bound to sites: `evaluate` and `decide` are pure; `init` and `adopt` make their states."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self._size = len(plan.sites)
        self.clipping = plan.clipping
        self.max_norm = plan.clipping.max_norm
        facts = [number for number, one in enumerate(plan.rules) if one.detector.finiteness]
        # A loss is not finite with its gradients more often than alone: those are asked first.
        self._facts = tuple(sorted(facts, key=lambda number: plan.rules[number].series.column == "loss"))
        self._fast_paths = FastPaths(plan, frozenset(facts))
        self.turns = Turns((one.series, one.detector.columns) for one in plan.rules)
        self._every_step = Decision(
            max_norm=self.max_norm, elementwise=bool(self.clipping.elementwise) and self.clipping.at == "step"
        )
        self._of_scaler = tuple(n for n, one in enumerate(plan.rules) if one.series.column in OF_SCALER)
        of_lr = (
            (number, np.concatenate([np.full(len(one), one.column == "lr") for one in bank.segments]))
            for number, bank in enumerate(plan.banks)
        )
        self._of_lr = {
            number: (mask, plan.banks[number].detector.init(len(mask)) if mask.all() else None)
            for number, mask in of_lr
            if mask.any()
        }
        # What is not known any more where another optimizer takes over.
        self._blind_anew = self._blind({number: mask for number, (mask, _) in self._of_lr.items()})
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
        """The reason why a rule of the file judges nothing here, by rule id."""
        return self.plan.inactive

    def warming_up(self, state: EngineState) -> dict[str, str]:
        """The rules none of whose baselines has the samples it needs to judge, with how many the fullest has."""
        found = {}
        for one in self.plan.rules:
            seen = None if one.bank == NO_BANK else getattr(state.baselines[one.bank], "n", None)
            needed = getattr(one.detector, "warmup", 0)
            if seen is not None and needed and int(seen[one.part].max(initial=0)) < needed:
                found[one.rule.id] = (
                    f"warm-up not over: {int(seen[one.part].max(initial=0))} of {needed} samples"
                )
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
        """The state carried over to these sites and rules by name; what is new starts empty."""
        after = EngineState.from_dict(state.to_dict(), self.plan)
        none = tuple(np.zeros(bank.size, np.bool_) for bank in self.plan.banks)
        return replace(after, begun_anew=tuple(NewBaselines(one.reason, none) for one in state.begun_anew))

    def evaluate(self, state: EngineState, snapshot: Snapshot) -> tuple[Verdict, EngineState]:
        """Judge one step. Pure; raises `GradwatchError` for a snapshot or a state of other sites.

        Facts (NaN, Inf, overflow) are judged first, because no baseline learns a step that is skipped
        for them. A provisional snapshot is judged for facts only. A step that the GradScaler itself rejected
        (`scalars["scaler_skip"]` not 0) is judged only by the rules on the scaler; for all others it did not
        happen.
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
        if state.active is not None and not snapshot.provisional and not jumped(state.lr, lr):
            path: FastPath | None = self._fast_paths[state.active]
            if state.unjudged and self._is_known(state, snapshot, in_turn):
                path = None
            learned = None if path is None else path.learn(state, snapshot, in_turn)
            if path is not None and learned is not None:
                if path.active_every_step or state.ordinary is None:
                    return self._active_alone(state, path.active_every_step, learned, lr)
                return state.ordinary, state.with_learned(learned.baselines, lr)
        return self._rule_by_rule(state, snapshot, in_turn, lr)

    def evaluate_many(
        self,
        state: EngineState,
        snapshots: Sequence[Snapshot],
        norm: NDArray[np.float32],
        anew: Sequence[int] = (),
    ) -> BlockVerdict:
        """Judge the first of several steps together, as far as they are surely as usual.

        As `evaluate` would one after the other, bit by bit; the next one is for `evaluate`. The Snapshots are not
        provisional, and every gradient has arrived; `norm` float32[T, P] are their norms. A rule without `do` may go on
        firing on the same series. Where the state has just been loaded, nothing is known to be usual. `anew` are the
        steps, in order, that are the first of another optimizer: as if each came after `for_another_optimizer`.
        """
        if state.plan is not self.plan or any(len(one.norm) != self._size for one in snapshots):
            raise GradwatchError("state or snapshot belongs to other sites; use adopt()")
        path: FastPath | None = None if state.active is None else self._fast_paths[state.active]
        firing = None if path is None else active_without_action(state, path.active_every_step)
        if path is None or firing is None or state.may_act:
            return BlockVerdict(state)
        lr, in_turn = state.lr, list[InTurn]()
        for t, snapshot in enumerate(snapshots):
            before, lr = lr, snapshot.scalars.get("lr", lr)
            turn = self.turns.in_turn(snapshot.step, state.overdue)
            missed = turn and self.turns.missed(turn, snapshot, state.overdue) is not state.overdue
            known = state.unjudged and self._may_be_known(state, snapshot, turn)
            unknown = t in anew and not self._blind_anew <= state.unjudged
            if missed or known or unknown or jumped(before, lr):
                break
            in_turn.append(turn)
        usual = len(in_turn)
        restarts = Restarts(anew, self._of_lr.keys(), self._without_rate) if anew else None
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
        self, state: EngineState, active: Iterable[int], learned: Learned, lr: float | None
    ) -> tuple[Verdict, EngineState]:
        """A step on which only rules that are pending or firing have anything to judge."""
        step = Step(state, learned.reader, self.rank)
        for number, result in learned.results.items():
            step.banks[number] = result
        for number in active:
            if self.plan.rules[number].series.column != OTHER_RULES:
                step.judge(number)
        if self.plan.conditions:
            step.judge_conditions()
        return step.finish(learned.baselines, lr)

    def _rejected(
        self, state: EngineState, snapshot: Snapshot, in_turn: InTurn
    ) -> tuple[Verdict, EngineState]:
        """A step that the GradScaler rejected: its gradients are the scaler's own affair."""
        if not self._of_scaler:
            return Verdict(firing_now(state)), state
        step = Step(state, Reader(snapshot, in_turn, self.plan.roots), self.rank)
        step.begin_anew(state.begun_anew)
        baselines = step.learn(state.baselines, learning=True, only=OF_SCALER)
        for number in self._of_scaler:
            step.judge(number)
        step.judge_conditions(self._of_scaler)
        return step.finish(baselines, state.lr)

    def _rule_by_rule(
        self, state: EngineState, snapshot: Snapshot, in_turn: InTurn, lr: float | None
    ) -> tuple[Verdict, EngineState]:
        """Facts first, then what is learned, then all others."""
        baselines = state.baselines
        step = Step(state, Reader(snapshot, in_turn, self.plan.roots), self.rank)
        step.begin_anew(state.begun_anew)
        for number in self._facts:
            step.judge(number)
        if not snapshot.provisional:
            if jumped(state.lr, lr):
                touched = self._touched(np.ones(len(self.plan.sites), np.bool_), of_gradients=True)
                baselines = self._restarted(state, touched, keep_judging=True)
            baselines = step.learn(baselines, learning=not self._will_skip(step))
            for number in self._others:
                step.judge(number)
        step.judge_conditions(self._facts if snapshot.provisional else None)
        return step.finish(baselines, lr)

    def _may_be_known(self, state: EngineState, snapshot: Snapshot, in_turn: InTurn) -> bool:
        """True if a rule that conditions are about has something to judge at last, unless it is warming up."""
        reader = Reader(snapshot, in_turn, self.plan.roots)
        for one in map(self.plan.rules.__getitem__, state.unjudged):
            sample = None if snapshot.step % one.judged_every else reader.sample(one.series)
            if sample is not None and sample.present.any():
                return True
        return False

    def _is_known(self, state: EngineState, snapshot: Snapshot, in_turn: InTurn) -> bool:
        """True if a rule that conditions are about judges on this step what it never has."""
        reader, plan = Reader(snapshot, in_turn, self.plan.roots), self.plan
        return any(
            judges(one, plan, reader, () if one.bank == NO_BANK else state.baselines[one.bank])
            for one in map(plan.rules.__getitem__, state.unjudged)
            if snapshot.step % one.judged_every == 0
        )

    def _will_skip(self, step: Step) -> bool:
        """True if a fact leads to a skip, of its own or of its ladder."""
        rules = (self.plan.rules[number] for number in self._facts)
        return bool(step.acting) and any(
            one.skip is not None or "skip_step" in step.due[one.rule.id].climbed
            for one in rules
            if one.rule.mode == "act" and one.rule.id in step.acting
        )

    @property
    def asked(self) -> Asked:
        """Actions inside the backward, and their sites."""
        return asked(self.plan)

    def bounds(self, state: EngineState) -> tuple[Bound, ...]:
        """Bounds for the hooks on parameters in the next backward."""
        return bounds(self.plan, state)

    def module_bounds(self, state: EngineState) -> tuple[Bound, ...]:
        """Bounds for the hooks on modules in the next backward."""
        return module_bounds(self.plan, state)

    def decide(
        self, state: EngineState, verdict: Verdict, snapshot: Snapshot, failed: Failed = raised
    ) -> tuple[Decision, EngineState]:
        """The orders that follow from a verdict, joined over all rules; `state` is the one `evaluate`
        returned for this snapshot, and the one returned here has learned what was decided of it.

        The standing clips of the rule file hold on every step; a non-finite norm gets the coefficient 1
        (`gradwatch.policies`).
        """
        decision = self._every_step
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
        """The decision with the factors of the standing policies, and the state that has learned this step.

        A step that is skipped, that the GradScaler rejected or that is provisional is learned by none of them.
        `failed` is called for a policy at fault, which then does nothing on this step; without it the fault is raised.
        """
        if not self.clipping.policies or snapshot.scalars.get("scaler_skip"):
            return decision, state
        at_step = self.clipping.at == "step"  # else the hooks have done it
        coef = self.clipping.coefficients(state.clips, snapshot, failed) if at_step else None
        decision = decision if coef is None else decision | Decision(coef=coef)
        if decision.skip or snapshot.provisional:
            return decision, state
        return decision, replace(state, clips=self.clipping.learn(state.clips, snapshot, failed))

    def again(self, state: EngineState, snapshot: Snapshot, failed: Failed = raised) -> Decision:
        """Clipping of one more gradient of a step that has been judged; it updates no state."""
        if self.clipping.at == "backward":
            return Decision()  # the hooks have done it
        coef = self.clipping.coefficients(state.clips, snapshot, failed) if self.clipping.policies else None
        return self._every_step if coef is None else self._every_step | Decision(coef=coef)

    def fallback(self, total_norm: float) -> Decision:
        """The orders that hold without a verdict, should `evaluate` fail.

        The standing clip of the total (`clip` adds the others), and the skip of a step whose gradients are not
        finite where a rule asks for it.
        """
        broken = not math.isfinite(total_norm)
        skips = any(_on_gradients(one.rule) and one.rule.acts and one.skip for one in self.plan.rules)
        return replace(self._every_step, skip=broken and skips)

    @property
    def decision_otherwise(self) -> Decision:
        """The decision on a step on which no rule acts, but for what policies of `clip:` make of its norms."""
        return self._every_step

    def usual_norms(self, state: EngineState) -> dict[str, float]:
        """The usual norm of each parameter's gradient, by its name, as far as a rule has learned it (`spike`)."""
        return usual_norms(self.plan, state.baselines)

    def rebaseline(
        self, state: EngineState, glob: str = "*", reason: str = "", rules: Collection[str] = ()
    ) -> EngineState:
        """The state with the baselines of all sites that match `glob` forgotten, and of totals they are part of.

        Those of clip policies too; with `rules`, only those that these rules judge by. For changes made on purpose:
        those series are blind until they have warmed up again, and nothing of them is firing any more. The next step
        tells so, with the `reason`.
        """
        mask_S = self.sites.select(glob)
        masks = self._touched(mask_S, rules=rules)
        if not any(mask.any() for mask in masks) and rules:
            return state
        return EngineState(
            self.plan,
            self._restarted(state, masks, keep_judging=False),
            state.tracks,
            state.consecutive,
            state.lr,
            clips=state.clips if rules else self.clipping.reset(state.clips, mask_S),
            overdue=state.overdue,
            unjudged=state.unjudged | self._blind(dict(enumerate(masks))),
            begun_anew=(*state.begun_anew, NewBaselines(reason, masks)),
        )

    def with_other_parameters(self, state: EngineState, before: BoundEngine, reason: str) -> EngineState:
        """The state that was adopted from `before`, without the baselines of what is made of other parameters now.

        Those are totals, groups, and what compares parameters with each other. Values that are not made of gradients
        keep theirs, and so do clip policies: a step after such a change is not to go unclipped.
        """
        masks = tuple(
            np.concatenate(
                [
                    self._made_of_others(bank.detector, one, before)
                    & (type(bank.detector).rebaseline is not Detector.rebaseline)
                    for one in bank.segments
                ]
            )
            for bank in self.plan.banks
        )
        if not any(mask.any() for mask in masks):
            return state
        return replace(
            state,
            baselines=self._restarted(state, masks, keep_judging=False),
            unjudged=state.unjudged | self._blind(dict(enumerate(masks))),
            begun_anew=(*state.begun_anew, NewBaselines(reason, masks)),
        )

    def _made_of_others(self, detector: Detector, one: Series, before: BoundEngine) -> BoolArray:
        """bool[K]: the series that are made of other parameters than they were before, or compared with others."""
        if (one.scope == "param" and detector.elementwise) or not _of_gradients(one.column):
            return np.zeros(len(one), np.bool_)
        known = (each for bank in before.plan.banks for each in bank.segments)
        former = next((each for each in known if each.key == one.key), None)
        now = one.members(self.sites)
        was = {} if former is None else dict(zip(former.names, former.members(before.sites), strict=True))
        if one.scope == "param":
            return np.full(len(one), former is not None and former.names != one.names)
        return np.array(
            [was.get(name, own) != own for name, own in zip(one.names, now, strict=True)], np.bool_
        )

    def for_another_optimizer(self, state: EngineState) -> EngineState:
        """The state without what was learned of the learning rate: another optimizer has a schedule of its own."""
        baselines = list(state.baselines)
        for number in self._of_lr:
            baselines[number] = self._without_rate(number, baselines[number])
        return replace(state, baselines=tuple(baselines), unjudged=state.unjudged | self._blind_anew)

    def _without_rate(self, bank: int, baseline: State) -> State:
        """The baseline of the bank with this number without what it learned of the learning rate."""
        mask, fresh = self._of_lr[bank]
        return self.plan.banks[bank].detector.rebaseline(baseline, mask, False) if fresh is None else fresh

    def _blind(self, masks: Mapping[int, BoolArray]) -> frozenset[int]:
        """The rules that conditions are about of which all series are among `masks`, bool[K] by bank."""
        found = ((number, self.plan.rules[number]) for number in self.plan.joined)
        return frozenset(
            number
            for number, one in found
            if one.yardsticks
            and all(each.bank in masks and masks[each.bank][each.part].all() for each in one.yardsticks)
        )

    def _touched(
        self, mask_S: BoolArray, of_gradients: bool = False, rules: Collection[str] = ()
    ) -> tuple[BoolArray, ...]:
        """bool[K] by bank: its series that any of these sites is part of.

        With `of_gradients` only those made of gradients, with `rules` only those that these judge. None of kinds that
        remember something else than what is usual.
        """
        named = (one for one in self.plan.rules if one.rule.id in rules)
        judged = {(each.bank, each.part.start) for one in named for each in one.yardsticks}
        return tuple(
            np.concatenate(
                [
                    one.touched(self.sites, mask_S)
                    & (not of_gradients or _of_gradients(one.column))
                    & (not rules or (number, part.start) in judged)
                    & (type(bank.detector).rebaseline is not Detector.rebaseline)
                    for one, part in zip(bank.segments, bank.parts, strict=True)
                ]
            )
            for number, bank in enumerate(self.plan.banks)
        )

    def _restarted(
        self, state: EngineState, masks: Iterable[BoolArray], keep_judging: bool
    ) -> tuple[State, ...]:
        banks = zip(self.plan.banks, state.baselines, masks, strict=True)
        return tuple(
            bank.detector.rebaseline(baseline, mask, keep_judging) if mask.any() else baseline
            for bank, baseline, mask in banks
        )


def _of_gradients(column: str) -> bool:
    return not (column in STEERED_BY_USER or is_observed(column))


def _named(rule: Rule) -> tuple[str, ...]:
    """The actions a rule may carry out, those of its ladder included."""
    return tuple(dict.fromkeys(action.does for action in rule.do))


def _skips_on_device(rule: Rule) -> bool:
    """True if a rule only skips non-finite gradients, for ever: `found_inf` does that without the host."""
    done = [
        action for action in rule.do if action.name != "localise"
    ]  # it changes nothing, and may come late
    skips = [action for action in done if action.name == "skip_step"]
    forever = all(
        action.params.get("max_consecutive") is None or action.params.get("then") != "stop"
        for action in skips
    )
    return rule.acts and _on_gradients(rule) and 0 < len(skips) == len(done) and forever


def _on_gradients(rule: Rule) -> bool:
    """True if a rule is about NaN and Inf in gradients."""
    return rule.kind == "nonfinite" and rule.detect.of not in RUNNING_STATISTICS


def jumped(before: float | None, now: float | None) -> bool:
    """True if the learning rate changed by more than a factor of 3; to or from 0 is no jump but a pause."""
    if before is None or now is None or before == now or not (before > 0 and now > 0):
        return False
    return not 1 / LR_JUMP <= now / before <= LR_JUMP
