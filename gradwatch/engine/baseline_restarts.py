"""Baselines that begin anew: by request, with other parameters, another optimizer, a jump of the learning rate.

Axes: K series of a bank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from gradwatch.detectors import Detector, State
from gradwatch.engine.engine_state import EngineState, NewBaselines
from gradwatch.engine.rule_plan import NO_BANK, Plan
from gradwatch.engine.series import Series
from gradwatch.records.columns import is_observed
from gradwatch.records.snapshot import BoolArray

LR_JUMP = 3.0
"""A learning rate that changes by more than this factor in a step re-baselines the gradients it steers."""

STEERED_BY_USER = frozenset({"loss", "lr", "loss_scale", "scaler_skip"})
"""Scalars that are not made of gradients: a jump of the learning rate re-baselines neither them nor observed ones."""

WARMING_UP = "warm-up not over"
"""Begins the reason of a rule that has not had the samples it needs."""


class BaselineRestarts:
    """States of one plan in which some or all baselines begin anew.

    Every method is pure, but for what `warm` keeps. `of_lr` are the banks, by number, that judge the learning rate,
    with bool[K] which of their series do. `blind_anew` are the numbers of the rules that conditions are about and that
    have judged nothing once these begin anew. `warm` are the ids of the rules whose warm-up was over before their
    baselines began anew: they have had data.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        of_lr = (
            (number, np.concatenate([np.full(len(one), one.column == "lr") for one in bank.segments]))
            for number, bank in enumerate(plan.banks)
        )
        self.of_lr = {number: mask for number, mask in of_lr if mask.any()}
        self._fresh = {
            number: plan.banks[number].detector.init(len(mask))
            for number, mask in self.of_lr.items()
            if mask.all()
        }
        self.blind_anew = self._blind(self.of_lr)
        self.warm: set[str] = set()

    def go_on_from(self, previous: BaselineRestarts, state: EngineState) -> None:
        """Remember the rules that were warm in a plan whose `state` is taken over."""
        self.warm |= previous.warm | warm(state.plan, state)

    def after_rate_jump(self, state: EngineState) -> tuple[State, ...]:
        """The baselines without the levels learned from gradients, after the learning rate has jumped (`jumped`).

        Rules go on judging by what else they have learned while they learn the new level.
        """
        touched = self._touched(np.ones(len(self._plan.sites), np.bool_), of_gradients=True)
        return self._restarted(state, touched, keep_judging=True)

    def rebaseline(
        self, state: EngineState, glob: str = "*", reason: str = "", rules: Collection[str] = ()
    ) -> EngineState:
        """The state without the baselines of all sites that match `glob`, and of totals they are part of.

        Baselines of clip policies go too. With `rules`, only the baselines by which these rules judge. This is for
        changes made on purpose: these series are not judged until they have warmed up again, and none of them is firing
        any more. The Record of the next step carries the `reason`.
        """
        mask_S = self._plan.sites.select(glob)
        masks = self._touched(mask_S, rules=rules)
        if not any(mask.any() for mask in masks) and rules:
            return state
        return EngineState(
            self._plan,
            self._restarted(state, masks, keep_judging=False),
            state.tracks,
            state.consecutive,
            state.lr,
            clips=state.clips if rules else self._plan.clipping.reset(state.clips, mask_S),
            overdue=state.overdue,
            unjudged=state.unjudged | self._blind(dict(enumerate(masks))),
            begun_anew=(*state.begun_anew, NewBaselines(reason, masks)),
            stage=state.stage,
        )

    def with_other_parameters(self, state: EngineState, before: Plan, reason: str) -> EngineState:
        """The state adopted from the plan `before`, without baselines that are made of other parameters now.

        Those are the baselines of totals, of groups, and of rules that compare parameters with each other. Values that
        are not made of gradients keep theirs. Clip policies do too: a step after such a change is not to go unclipped.
        """
        masks = tuple(
            np.concatenate(
                [
                    self._made_of_others(bank.detector, one, before)
                    & (type(bank.detector).rebaseline is not Detector.rebaseline)
                    for one in bank.segments
                ]
            )
            for bank in self._plan.banks
        )
        if not any(mask.any() for mask in masks):
            return state
        return replace(
            state,
            baselines=self._restarted(state, masks, keep_judging=False),
            unjudged=state.unjudged | self._blind(dict(enumerate(masks))),
            begun_anew=(*state.begun_anew, NewBaselines(reason, masks)),
        )

    def _made_of_others(self, detector: Detector, one: Series, before: Plan) -> BoolArray:
        """bool[K]: the series that are made of other parameters than they were before, or compared with others."""
        if (one.scope == "param" and detector.elementwise) or not _of_gradients(one.column):
            return np.zeros(len(one), np.bool_)
        known = (each for bank in before.banks for each in bank.segments)
        former = next((each for each in known if each.key == one.key), None)
        now = one.members(self._plan.sites)
        was = {} if former is None else dict(zip(former.names, former.members(before.sites), strict=True))
        if one.scope == "param":
            return np.full(len(one), former is not None and former.names != one.names)
        return np.array(
            [was.get(name, own) != own for name, own in zip(one.names, now, strict=True)], np.bool_
        )

    def for_another_optimizer(self, state: EngineState) -> EngineState:
        """The state without what was learned of the learning rate: another optimizer has its own schedule."""
        baselines = list(state.baselines)
        for number in self.of_lr:
            baselines[number] = self.without_rate(number, baselines[number])
        return replace(state, baselines=tuple(baselines), unjudged=state.unjudged | self.blind_anew)

    def without_rate(self, bank: int, baseline: State) -> State:
        """The baseline of bank number `bank` without what it has learned of the learning rate."""
        fresh = self._fresh.get(bank)
        return (
            self._plan.banks[bank].detector.rebaseline(baseline, self.of_lr[bank], False)
            if fresh is None
            else fresh
        )

    def _blind(self, masks: Mapping[int, BoolArray]) -> frozenset[int]:
        """The rules that conditions are about of which all series are among `masks`, bool[K] by bank."""
        found = ((number, self._plan.rules[number]) for number in self._plan.joined)
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
        named = (one for one in self._plan.rules if one.rule.id in rules)
        judged = {(each.bank, each.part.start) for one in named for each in one.yardsticks}
        return tuple(
            np.concatenate(
                [
                    one.touched(self._plan.sites, mask_S)
                    & (not of_gradients or _of_gradients(one.column))
                    & (not rules or (number, part.start) in judged)
                    & (type(bank.detector).rebaseline is not Detector.rebaseline)
                    for one, part in zip(bank.segments, bank.parts, strict=True)
                ]
            )
            for number, bank in enumerate(self._plan.banks)
        )

    def _restarted(
        self, state: EngineState, masks: Iterable[BoolArray], keep_judging: bool
    ) -> tuple[State, ...]:
        self.warm |= warm(self._plan, state)
        banks = zip(self._plan.banks, state.baselines, masks, strict=True)
        return tuple(
            bank.detector.rebaseline(baseline, mask, keep_judging) if mask.any() else baseline
            for bank, baseline, mask in banks
        )


def warming_up(plan: Plan, state: EngineState) -> dict[str, str]:
    """Rules that cannot judge yet: by id, how many samples the fullest of their baselines has, in words."""
    found = {}
    for one in plan.rules:
        seen = None if one.bank == NO_BANK else getattr(state.baselines[one.bank], "n", None)
        needed = one.detector.samples_needed
        if seen is not None and needed and (fullest := int(seen[one.part].max(initial=0))) < needed:
            found[one.rule.id] = f"{WARMING_UP}: {fullest} of {needed} samples"
    return found


def warm(plan: Plan, state: EngineState) -> set[str]:
    """The ids of the rules with at least one baseline that has the samples it needs."""
    return {one.rule.id for one in plan.rules} - warming_up(plan, state).keys()


def jumped(before: float | None, now: float | None) -> bool:
    """True if the learning rate changed by more than a factor of 3; to or from 0 is no jump but a pause."""
    if before is None or now is None or before == now or not (before > 0 and now > 0):
        return False
    return not 1 / LR_JUMP <= now / before <= LR_JUMP


def _of_gradients(column: str) -> bool:
    return not (column in STEERED_BY_USER or is_observed(column))
