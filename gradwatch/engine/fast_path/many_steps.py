"""Many ordinary steps judged in one call, with bit for bit the result of `FastPath` on each of them.

The arrays of one step are small, so that its cost is the calls. Hence everything that does not depend on the step
before is done for all steps at once, and only the recurrences of the baselines run through the steps. The block ends
before the first step that may not be ordinary; that step is judged by itself.

Axes: T steps, S sites, P parameters, K series of one bank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import State, leading
from gradwatch.detectors import breaches as breaches_of
from gradwatch.detectors.baseline import logs_of_scalars
from gradwatch.engine.conditions.evaluation import values_of
from gradwatch.engine.engine_state import EngineState
from gradwatch.engine.fast_path.one_step import (
    BY_RANK,
    FLOAT32_MAX,
    TINY,
    UNKNOWN,
    FastPath,
    breaches,
    coef_bounds,
    scalars_of,
    stacked_logs,
)
from gradwatch.engine.fast_path.prepared_rules import BankInput
from gradwatch.engine.firing import FiringState, unchanged_by
from gradwatch.engine.judge import firing_now, under_factor
from gradwatch.engine.judged_steps.staggered_judging import InTurn
from gradwatch.engine.reporting.incident_inhibition import released
from gradwatch.engine.rule_plan import NO_BANK, RulePlan
from gradwatch.engine.snapshot_reader import Reader
from gradwatch.records.columns import OTHER_RULES, is_scalar, scalar_name
from gradwatch.records.snapshot import BoolArray, FloatArray, Snapshot
from gradwatch.records.verdict import Verdict

NONE_BREACH: BoolArray = np.zeros(0, np.bool_)
HOLDS: BoolArray = np.ones(1, np.bool_)
"""Of a condition."""


def active_without_action(
    state: EngineState, rules: Sequence[int]
) -> list[tuple[RulePlan, FiringState]] | None:
    """The rules of these numbers with their FiringStates, if ordinary steps may leave all of them unchanged.

    None if one of them has a `do`, or learns from staggered series.
    """
    firing = {number for number in rules if bool(state.tracks[number].firing.any())}
    suspended = state.plan.suspended_while(firing)  # as long as these fire on
    found = [(state.plan.rules[number], state.tracks[number]) for number in rules if number not in suspended]
    known = (number for number in rules if number not in suspended)
    if any(released(state.plan, number, state.tracks[number], state.tracks) for number in known):
        return None  # it is reported when it is judged next
    alike = all(not one.rule.do and (one.series.phases is None or one.bank == NO_BANK) for one, _ in found)
    return found if alike else None


def _unchanged(one: RulePlan, track: FiringState, score: FloatArray) -> BoolArray | None:
    """bool[K]: the series that breach, where those of them that are judged and no others are firing; None elsewhere."""
    breach = breaches_of(one.detector, score)
    return breach if unchanged_by(track, breach, ~np.isnan(score), one.rule.for_) else None


class _Found(NamedTuple):
    """bool[K]: the series of a rule that breach, and those that were judged."""

    breach: BoolArray
    judged: BoolArray


class Restarts(NamedTuple):
    """Baselines that start over within a block: those of the `banks`, before each of the `steps`, in order."""

    steps: Sequence[int]
    banks: AbstractSet[int]
    restarted: Callable[[int, State], State]
    """Given the number of a bank and its baseline."""

    def parts(self, count: int) -> Iterable[tuple[int, int]]:
        """(first, end) for each part of the first `count` steps: a part ends where baselines start over."""
        bounds = sorted({0, *(step for step in self.steps if step < count), count})
        return pairwise(bounds)


class FastBlock:
    """Consecutive Snapshots in which every gradient has arrived."""

    __slots__ = (
        "_breaching",
        "_by_one_of_two",
        "_firing",
        "_in_turn",
        "_norm",
        "_path",
        "_restarts",
        "_scalars",
        "_snapshots",
    )

    def __init__(
        self,
        path: FastPath,
        snapshots: Sequence[Snapshot],
        in_turn: Sequence[InTurn],
        norm: NDArray[np.float32],
        firing: Sequence[tuple[RulePlan, FiringState]] = (),
        restarts: Restarts | None = None,
    ) -> None:
        """`norm` is float32[T, P], those of the Snapshots; `path` the evaluation while none but these rules is active.

        `firing` are those of them that every step has something to judge of.
        """
        self._path = path
        self._firing = firing
        self._breaching: list[dict[str, BoolArray]] = []
        self._by_one_of_two: dict[tuple[str, int], _Found] = {}
        self._snapshots = snapshots
        self._in_turn = in_turn
        self._restarts = restarts
        self._norm = norm
        self._scalars = [scalars_of(snapshot) for snapshot in snapshots]

    def leading_ordinary(self, state: EngineState) -> tuple[int, tuple[State, ...]]:
        """Number of leading steps that certainly change no rule, and the baselines after them."""
        count = min(self._usual(), self._conditions_unchanged(state))
        count = self._cannot_breach(count) if count else 0
        baselines = state.baselines
        totals = [snapshot.total_norm for snapshot in self._snapshots[:count]]
        logs = stacked_logs(self._norm[:count], totals, len(self._path.plan.sites))
        while count:
            below, baselines = self._advanced(state, logs[:count])
            if below == count:
                return count, baselines
            count = below
        return 0, state.baselines

    def _conditions_unchanged(self, state: EngineState) -> int:
        """Count the first steps on which no condition changes what it judges while no other rule changes."""
        plan, active = state.plan, state.active
        if not plan.conditions or active is None:
            return len(self._snapshots)
        first = self._snapshots[0].step
        open_ = any(one.window_open(state.tracks, first) for one in plan.conditions)
        # Else what the first step says of them all others do.
        for t, snapshot in enumerate(self._snapshots if open_ else self._snapshots[:1]):
            unreached = state.stage.unreached
            values = values_of(plan.conditions, state.tracks, state.unjudged, snapshot.step, unreached)
            for one in plan.conditions:
                if one.number in unreached:
                    continue
                track, holds = state.tracks[one.number], values[one.number]
                if track.idle:
                    unsettled = one.unsettled(state.tracks, active, snapshot.step)
                    unchanged = not holds and unsettled == (one.number in active)
                else:
                    for_ = plan.rules[one.number].rule.for_
                    unchanged = bool(holds) and unchanged_by(track, HOLDS, HOLDS, for_)
                if not unchanged:
                    return t
        return len(self._snapshots)

    def _usual(self) -> int:
        """Count the first steps judged by rules of every step only, and with finite gradients that are not 0."""
        totals = np.array([snapshot.total_norm for snapshot in self._snapshots])
        low, high = np.minimum.reduce(self._norm, axis=1), np.maximum.reduce(self._norm, axis=1)
        # Compared so that NaN is not usual.
        usual = (low > 0) & (high < np.inf) & (totals >= TINY) & (totals < FLOAT32_MAX)
        for every in self._path.rare:
            usual &= [snapshot.step % every != 0 for snapshot in self._snapshots]
        usual &= [self._staggered_idle(t) for t in range(len(usual))]
        return leading(usual)

    def _staggered_idle(self, t: int) -> bool:
        """True if step t has no columns but those of staggered rules, and no breach by them."""
        path, snapshot = self._path, self._snapshots[t]
        if BY_RANK.issuperset(snapshot.columns):
            return True
        in_turn = self._in_turn[t]
        return path.beside.issuperset(snapshot.columns) and path.staggered_idle(
            self._reader(t), snapshot, in_turn
        )

    def _cannot_breach(self, count: int) -> int:
        """Count the first of `count` steps that breach no rule without a baseline."""
        path, norm = self._path, self._norm[:count]
        asked = [*path.gathered]
        known = path.bounds(float(norm.min()), float(norm.max()))
        if path.of_coef:
            known = {**known, "coef": coef_bounds(self._snapshots[:count])}
        for guard in path.guards:
            least, most = known.get(guard.column, UNKNOWN)
            if not (guard.low <= least and most <= guard.high):
                asked += guard.rules
        of_scalars: list[RulePlan] = []
        for one in path.unbounded:
            if is_scalar(one.series.column):
                of_scalars.append(one)
            elif not one.detector.cannot_breach(*known.get(one.series.column, UNKNOWN)):
                asked.append(one)
        for t, scalars in enumerate(self._scalars[:count]):
            for name, value in scalars.items():
                of_scalar = path.of_scalars.get(name)
                if of_scalar is not None and not of_scalar.low <= value <= of_scalar.high:
                    return t
            for one in of_scalars:
                given = scalars.get(scalar_name(one.series.column))
                if given is not None and not one.detector.cannot_breach(given, given):
                    return t
            if asked or self._firing:
                reader = self._reader(t)
                if any(breaches(one, reader) for one in asked):
                    return t
                breaching = self._breach_on(reader)
                if breaching is None:
                    return t
                self._breaching.append(breaching)
        return count

    def _breach_on(self, reader: Reader) -> dict[str, BoolArray] | None:
        """bool[K] for the firing rules without a baseline: the series that breach on; None where that changes any."""
        found: dict[str, BoolArray] = {}
        for one, track in self._firing:
            # What a condition joins has not changed (`_conditions_unchanged`).
            found[one.rule.id] = track.firing if one.series.column == OTHER_RULES else NONE_BREACH
            if one.bank != NO_BANK or one.series.column == OTHER_RULES:
                continue
            sample = reader.sample(one.series, one.detector.columns)
            if sample is None and one.series.phases is not None:
                continue  # none of its series is in turn
            breach = None if sample is None else _unchanged(one, track, one.detector.score((), sample))
            if breach is None:
                return None
            found[one.rule.id] = breach
        return found

    def verdicts(self, state: EngineState, count: int) -> list[Verdict]:
        """The verdicts on the first `count` steps, which change no rule."""
        if not self._firing and state.ordinary is not None:
            return [state.ordinary] * count
        firing, standing = firing_now(state), under_factor(state.plan, state.tracks)
        if not self._firing:
            return [Verdict(firing, standing=standing)] * count
        known: dict[tuple[bytes, ...], Verdict] = {}
        keys = []
        for found in self._breaching[:count]:
            keys.append(key := tuple(breach.tobytes() for breach in found.values()))
            if key not in known:
                known[key] = Verdict(firing, self._spread(found), standing=standing)
        return [known[key] for key in keys]

    def _spread(self, found: Mapping[str, BoolArray]) -> dict[str, BoolArray]:
        """bool[S] for each rule of which some series breaches."""
        shown = {one.rule.id: one.shown for one, _ in self._firing}
        size = len(self._path.plan.sites)
        return {rule: shown[rule].spread(breach, size) for rule, breach in found.items() if breach.any()}

    def _reader(self, t: int) -> Reader:
        return Reader(self._snapshots[t], self._in_turn[t], self._path.plan.roots)

    def _advanced(self, state: EngineState, logs: NDArray[np.float32]) -> tuple[int, tuple[State, ...]]:
        """Count the first steps that come close to no threshold; with the baselines after them where that is all."""
        count, after = len(logs), list(state.baselines)
        self._by_one_of_two.clear()
        for bank in self._path.bank_inputs:
            if not count or (state.done and state.done[bank.number] and not bank.result_wanted):
                continue
            if self._restarts is None or bank.number not in self._restarts.banks:
                below, after[bank.number] = self._learned(bank, after[bank.number], logs, 0, count)
            else:
                below, after[bank.number] = self._learned_in_parts(
                    bank, after[bank.number], logs, count, self._restarts
                )
            count = min(count, below)
        return count, tuple(after)

    def _learned_in_parts(
        self, bank: BankInput, state: State, logs: NDArray[np.float32], count: int, restarts: Restarts
    ) -> tuple[int, State]:
        for first, end in restarts.parts(count):
            if first in restarts.steps:
                state = restarts.restarted(bank.number, state)
            below, state = self._learned(bank, state, logs, first, end)
            if below < end:
                return below, state
        return count, state

    def _learned(
        self, bank: BankInput, before: State, logs: NDArray[np.float32], first: int, end: int
    ) -> tuple[int, State]:
        """Of the steps from `first` on, the number of the one that comes close to a threshold, or `end`."""
        if bank.result_wanted:
            return self._learned_while_firing(bank, before, first, end)
        chosen: NDArray[np.float32] | None = None
        if bank.alone and bank.select is not None:
            chosen = logs_of_scalars([snapshot.total_norm for snapshot in self._snapshots[first:end]])[
                :, None
            ]
        elif bank.select is not None:
            chosen = logs[first:end, bank.select]
        elif bank.scalar:
            values = [scalars.get(bank.scalar) for scalars in self._scalars[first:end]]
            if values.count(None) == len(values):
                return end, before
            known = [value for value in values if value is not None and math.isfinite(value)]
            scaled = bank.detector.logs_of(known) if len(known) == len(values) else None
            chosen = None if scaled is None else scaled[:, None]
        if chosen is None:
            return self._one_by_one(bank, before, first, end)
        below, after = bank.detector.advance_many_logs(before, chosen)
        return first + below, after

    def _learned_while_firing(self, bank: BankInput, state: State, first: int, end: int) -> tuple[int, State]:
        """As `_one_by_one`, of a bank some of whose rules fire: up to where that changes."""
        firing = [
            (one, track, yardstick)
            for one, track in self._firing
            for yardstick in one.yardsticks
            if yardstick.bank == bank.number
        ]
        for t in range(first, end):
            sample = bank.bank.sample(self._reader(t))
            if sample is None:
                return t, state
            score, after = bank.detector.advance(state, sample)
            if score is not None and bank.idle_may_breach(score):
                return t, state
            whole = bank.detector.score(state, sample) if score is None else score
            for one, track, yardstick in firing:
                score = whole[yardstick.part]
                found = self._with_other(
                    one, t, _Found(breaches_of(yardstick.detector, score), ~np.isnan(score))
                )
                if found is None:
                    continue
                if not unchanged_by(track, *found, one.rule.for_):
                    return t, state
                self._breaching[t][one.rule.id] = found.breach
            state = after
        return end, state

    def _with_other(self, one: RulePlan, t: int, found: _Found) -> _Found | None:
        """The result of both yardsticks of a rule at step t; None until both have been asked."""
        if one.second is None:
            return found
        before = self._by_one_of_two.pop((one.rule.id, t), None)
        if before is None:
            self._by_one_of_two[one.rule.id, t] = found
            return None
        return _Found(before.breach | found.breach, before.judged | found.judged)

    def _one_by_one(self, bank: BankInput, state: State, first: int, end: int) -> tuple[int, State]:
        """As `_learned`, of a kind that does not learn from logarithms alone."""
        t = first
        while t < end:
            if bank.scalar and bank.scalar not in self._scalars[t]:
                t += 1
                continue
            if bank.one_value:
                passed, state = bank.detector.advance_scalars(state, self._scalars[t:end])
                t += passed
                if passed:
                    continue
            sample = bank.bank.sample(self._reader(t))
            if sample is not None:
                score, after = bank.detector.advance(state, sample)
                if score is not None and bank.idle_may_breach(score):
                    return t, state
                state = after
            t += 1
        return end, state
