"""The rules of a file on recorded Snapshots, one after the other, with the engine that judges them live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gradwatch.engine import Engine
from gradwatch.engine.bound_engine import UNCLIPPED, BoundEngine
from gradwatch.engine.changed_parameters import changed_parameters
from gradwatch.engine.columns_needed import batches_hashed_every
from gradwatch.engine.engine_state import EngineState, rules_anew
from gradwatch.engine.judged_steps.staggered_judging import InTurn
from gradwatch.records.columns import BATCH_HASH
from gradwatch.records.decision import Decision
from gradwatch.records.snapshot import BoolArray, Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.rule_tests.simulate import carried_out, clipped_in_backward
from gradwatch.rules.rule_set import RuleSet

MOST_TOGETHER = 64
FEWEST_TOGETHER = 2
MOST_ALONE = 64
"""Snapshots that are judged alone, at most, before several are tried together again."""


class Judged(NamedTuple):
    """The verdict of rules on one Snapshot, and what they would have had done of it.

    `engine` are the rules that were bound to its sites, `in_turn` the staggered series that they judged.
    """

    verdict: Verdict
    decision: Decision
    engine: BoundEngine
    in_turn: InTurn


@dataclass(slots=True)
class BoundRules:
    """Rules bound to the sites of one optimizer, and what they have learned of it.

    `params` bool[S]: the sites that are parameters; `in_backward`: rules clip there. `alone` counts the Snapshots that
    are to be judged alone, since several together were last tried in vain; `backoff` is how many these were.
    """

    engine: BoundEngine
    state: EngineState
    params: BoolArray
    in_backward: bool
    alone: int = 0
    backoff: int = 0

    @property
    def may_judge_many(self) -> bool:
        """True if nothing acts and no policy learns, so that ordinary steps can be judged together."""
        clipping = self.engine.clipping
        learning = bool(clipping.policies or clipping.elementwise or self.in_backward)
        return not (learning or self.state.may_act or self.alone) and bool(self.params.all())


class RuleJudge:
    """Judges the Snapshots of a run in their order; what is decided is not carried out.

    The states are immutable, so that a copy costs nothing: a run can be judged in two ways from any step on.
    `rank` is only told to annotations.
    """

    def __init__(self, ruleset: RuleSet, rank: int = 0) -> None:
        self.ruleset = ruleset
        self._engines: dict[int, Engine] = {}
        self._engine = Engine(ruleset, rank)
        self._bound: dict[int, BoundRules] = {}
        self._hashed_every = batches_hashed_every(ruleset)

    def judge(self, snapshot: Snapshot, clipped: bool = False) -> Judged:
        """Judge the next Snapshot of its optimizer.

        `clipped`: gradwatch itself changed the gradients of this step, so that its norms after clipping hold that.
        """
        one = self.bind(snapshot)
        snapshot = self._as_measured(snapshot, one)
        if one.in_backward and not clipped:
            snapshot = clipped_in_backward(snapshot, one.engine.bounds(one.state, snapshot.step), one.params)
        verdict, state = one.engine.evaluate(one.state, snapshot)
        decision, one.state = one.engine.decide(state, verdict, snapshot)
        one.alone = max(0, one.alone - 1)
        return Judged(verdict, done(decision, snapshot, one), one.engine, one.state.in_turn)

    def judge_all(self, snapshots: Sequence[Snapshot]) -> Iterator[Judged]:
        """Judge Snapshots of one optimizer and its sites as `judge` does each, many together where they are usual."""
        at = 0
        while at < len(snapshots):
            together = self._judge_many(snapshots[at : at + MOST_TOGETHER])
            yield from together or (self.judge(snapshots[at]),)
            at += len(together) or 1

    def _judge_many(self, snapshots: Sequence[Snapshot]) -> list[Judged]:
        """The first of these that are surely as usual; none where even two are not."""
        one = self.bind(snapshots[0])
        if len(snapshots) < FEWEST_TOGETHER or not one.may_judge_many:
            return []
        ordinary: list[Snapshot] = []
        for snapshot in snapshots:
            if not is_ordinary(snapshot):
                break
            ordinary.append(self._as_measured(snapshot, one))
        count = 0
        if len(ordinary) >= FEWEST_TOGETHER:
            norm = np.array([snapshot.norm for snapshot in ordinary])
            judged = one.engine.evaluate_many(one.state, ordinary, norm)
            count = len(judged.in_turn)
        if count < FEWEST_TOGETHER:
            one.backoff = one.alone = min(2 * one.backoff + 1, MOST_ALONE)
            return []
        one.state, one.backoff = judged.state, 0
        otherwise, clips_from = one.engine.decision_otherwise, one.engine.clips_from
        steps = zip(ordinary[:count], judged.verdicts, judged.in_turn, strict=True)
        return [
            Judged(verdict, done(decision, snapshot, one), one.engine, turn)
            for snapshot, verdict, turn in steps
            for decision in (otherwise if snapshot.step >= clips_from else UNCLIPPED,)
        ]

    def bind(self, snapshot: Snapshot) -> BoundRules:
        """The rules bound to the sites of a Snapshot; what was learned of others before is carried over by name."""
        before = self._bound.get(snapshot.optimizer)
        if before is not None and (
            before.engine.sites is snapshot.sites or before.engine.sites.alike(snapshot.sites)
        ):
            return before
        rules = self._engines.get(snapshot.optimizer, self._engine).bind(snapshot.sites)
        if before is None:
            state = rules.init()
        else:
            state = rules.adopt(before.state, before.engine)
            reason = changed_parameters(before.engine.sites, rules.sites)
            if reason:
                state = rules.restarts.with_other_parameters(state, before.engine.plan, reason)
        return self._bind(snapshot.optimizer, rules, state)

    def _bind(self, optimizer: int, rules: BoundEngine, state: EngineState) -> BoundRules:
        params = np.array([kind == "param" for kind in rules.sites.kinds], np.bool_)
        self._bound[optimizer] = one = BoundRules(rules, state, params, bool(rules.asked))
        return one

    def _as_measured(self, snapshot: Snapshot, one: BoundRules) -> Snapshot:
        """The Snapshot as these rules would have had it measured: with their groups, and without what none asks for."""
        if snapshot.sites is not one.engine.sites:
            snapshot = replace(snapshot, sites=one.engine.sites)
        if BATCH_HASH in snapshot.scalars and all(snapshot.step % every for every in self._hashed_every):
            rest = {name: value for name, value in snapshot.scalars.items() if name != BATCH_HASH}
            snapshot = replace(snapshot, scalars=rest)
        return snapshot

    def restrict(self, optimizer: int, ruleset: RuleSet) -> None:
        """Judge the next steps of one optimizer by a part of the rules; these go on with what they have learned."""
        self._engines[optimizer] = Engine(ruleset, self._engine.rank)
        before = self._bound.get(optimizer)
        if before is not None:
            rules = self._engines[optimizer].bind(before.engine.sites)
            self._bind(optimizer, rules, rules.adopt(before.state, before.engine))

    def rebaseline(
        self, optimizer: int, reason: str, named: AbstractSet[str], known: AbstractSet[str]
    ) -> None:
        """Have baselines of one optimizer begin anew before its next step, as `gw.rebaseline()` has done live.

        `named` are the rules that did live, of those `known` there. Where some that could did not, the script had
        asked for some rules alone.
        """
        one = self._bound.get(optimizer)
        if one is None:
            return
        after = one.engine.restarts.rebaseline(one.state, "*", reason)
        could = {one.engine.plan.rules[k].rule.id for k in rules_anew(one.engine.plan, after.begun_anew[-1])}
        if could & known <= named:
            one.state = after
        elif could & named:
            one.state = one.engine.restarts.rebaseline(one.state, "*", reason, sorted(could & named))

    def warming_up(self, optimizer: int) -> dict[str, str]:
        """The rules of one optimizer that have not had the samples they need, with how many they had."""
        one = self._bound.get(optimizer)
        return {} if one is None else one.engine.warming_up(one.state)

    def copy(self) -> RuleJudge:
        """A judge with what this one has learned; neither learns of the other."""
        other = RuleJudge(self.ruleset, self._engine.rank)
        other._engine, other._engines = self._engine, dict(self._engines)
        other._bound = {optimizer: replace(one) for optimizer, one in self._bound.items()}
        return other


def is_ordinary(snapshot: Snapshot) -> bool:
    """True of a step with all gradients, that nothing in the loop sets apart."""
    return not (
        snapshot.provisional
        or snapshot.loss_scale is not None
        or snapshot.histograms
        or not snapshot.applied_known
    ) and bool(snapshot.calls.all())


def done(decision: Decision, snapshot: Snapshot, one: BoundRules) -> Decision:
    """The decision as it would have been carried out."""
    inside = bool(one.engine.clipping) and one.engine.clipping.at == "backward"
    if not (decision.acts or decision.orders or inside):
        return decision  # almost every step
    return carried_out(decision, snapshot, inside)
