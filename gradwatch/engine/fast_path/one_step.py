"""The step on which no idle rule trips, proven by a few bounds, after which every baseline learns.

Between two sweeps over all gradients the caches are cold, and a step costs as many microseconds as it touches
functions and arrays. So what a healthy step needs is laid out when the rules are bound (`prepared_rules`): the values
each column may take without any rule asking more, and which baselines learn from one shared logarithm. Rules that are
pending or firing are left to `Step`, which then judges those alone. `FastPath` answers "no other rule trips, this was
learned" or None, and never reports anything itself: whatever it is not certain of is judged by `Step` from the start,
so both always agree.

Axes: S sites, K series of one bank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Detector, State, may_breach
from gradwatch.detectors.baseline import log_of_scalar
from gradwatch.engine.engine_state import EngineState
from gradwatch.engine.fast_path.prepared_rules import bank_inputs, column_bounds, is_bounded, is_proven
from gradwatch.engine.judge import BankResult
from gradwatch.engine.judged_steps.staggered_judging import InTurn, Turn
from gradwatch.engine.rule_plan import NO_BANK, Plan, RulePlan
from gradwatch.engine.snapshot_reader import Reader
from gradwatch.records.columns import OTHER_RULES, RANK_COLUMNS, is_scalar, scalar_name
from gradwatch.records.snapshot import Column, Snapshot

FLOAT32_MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).smallest_subnormal)
NORMAL = float(np.finfo(np.float32).tiny)
"""Below this a float32 has fewer digits than `ROUNDING` allows for."""
ROUNDING = 1e-6
"""Relative; more than float32 arithmetic on a bound can be off."""

BY_RANK: frozenset[str] = RANK_COLUMNS | {"rank_site"}
"""Columns that are there on healthy steps too, where ranks talk."""

BEHIND_RANKS: frozenset[str] = frozenset({"norm_local"})
"""Columns from which those are made; where no rule reads them as well, they say nothing by themselves."""


class Learned(NamedTuple):
    """The baselines after a step on which no idle rule trips, and the results by which active rules are judged."""

    baselines: tuple[State, ...]
    reader: Reader
    results: Mapping[int, BankResult]
    """By number of the bank; of those with a rule that is active."""


class FastPath:
    """The evaluation of `plan` on a step on which no rule trips but those `active`, which are judged by `Step`.

    `active` are the numbers of rules that are pending or firing; it must hold none that is about finiteness. Those
    `unreached` judge nothing yet (`from_step`): they learn, and trip at no value. What it
    compares of a step is laid out in its attributes, which `FastBlock` reads too: `rare` the cadences at whose steps
    more rules are due; `guards`, `of_scalars`, `unbounded` and `gathered` the rules without a baseline, by how it is
    known that they do not breach; `bank_inputs` the baselines; `beside` the columns that a step may have.
    """

    __slots__ = (
        "_params",
        "_roots",
        "_stacked",
        "_staggered",
        "active_every_step",
        "bank_inputs",
        "beside",
        "gathered",
        "guards",
        "of_coef",
        "of_scalars",
        "plan",
        "rare",
        "unbounded",
    )

    def __init__(
        self,
        plan: Plan,
        active: AbstractSet[int] = frozenset(),
        unreached: AbstractSet[int] = frozenset(),
    ) -> None:
        self.plan = plan
        # A rule with `for: 1` that is active is firing, and suspends those that say so.
        suspended = plan.suspended_while({n for n in active if plan.rules[n].rule.for_ == 1}) | unreached
        # Those with an `every` of their own are due at steps that are judged from the start.
        self.active_every_step = tuple(
            sorted(n for n in active - suspended if plan.rules[n].judged_every == 1)
        )
        # Where no other rule changes, a condition that is not active does not either (`BoundCondition.unsettled`).
        idle = [
            one
            for number, one in enumerate(plan.rules)
            if number not in active | suspended and one.series.column != OTHER_RULES
        ]
        guarded = [one for one in idle if one.bank == NO_BANK and not (one.rare or is_proven(one))]
        # Of those that judge nothing the ones that learn: no step on which they do is passed over.
        self._staggered = tuple(
            one
            for number, one in enumerate(plan.rules)
            if one.series.phases is not None
            and (number not in active | suspended or (number in suspended and one.bank != NO_BANK))
        )
        others = (one.detector.columns for one in plan.rules if one.series.phases is None)
        staggered = frozenset[str]().union(
            *(one.detector.columns for one in plan.rules if one.series.phases is not None)
        )
        read = frozenset[str]().union(*(one.detector.columns for one in plan.rules))
        self.beside = BY_RANK | staggered.difference(*others) | BEHIND_RANKS - read
        guards = tuple(column_bounds(one for one in guarded if is_bounded(one)))
        self.guards = tuple(one for one in guards if not is_scalar(one.column))
        self.of_coef = any(one.column == "coef" for one in guards)
        # Looked up by what a step has: most of what rules are about is not there on a healthy one.
        self.of_scalars = {scalar_name(one.column): one for one in guards if is_scalar(one.column)}
        self.unbounded = tuple(one for one in guarded if one.series.owners is None and not is_bounded(one))
        self.gathered = tuple(one for one in guarded if one.series.owners is not None)
        self.rare = tuple({one.judged_every for one in plan.rules} - {1})
        self.bank_inputs = tuple(bank_inputs(plan, active - suspended, suspended))
        self._stacked = any(
            bank_input.select is not None and not bank_input.alone for bank_input in self.bank_inputs
        )
        self._params = plan.sites.kinds.count("param")  # they come first
        roots = plan.roots[: self._params] if self._params else np.ones(1, np.float32)
        self._roots = float(roots.max()), float(roots.min())

    def learn(self, state: EngineState, snapshot: Snapshot, in_turn: InTurn) -> Learned | None:
        """The baselines after this step; None unless the step certainly changes no rule but the active ones.

        Of staggered series only those `in_turn` are judged.
        """
        if not self.beside.issuperset(snapshot.columns):
            return None
        for every in self.rare:
            if snapshot.step % every == 0:
                return None
        norm, calls, total = (
            snapshot.norm[: self._params],
            snapshot.calls[: self._params],
            snapshot.total_norm,
        )
        complete = len(norm) > 0 and bool(np.minimum.reduce(calls) > 0)
        if not complete:
            norm = norm[calls > 0]
            if not len(norm):
                return None
        low, high = float(np.minimum.reduce(norm)), float(np.maximum.reduce(norm))
        # Negated, so that NaN is not quiet. From here on every gradient that is there is finite.
        if not (low >= 0 and high < math.inf and TINY <= total < FLOAT32_MAX):
            return None
        scalars, reader = scalars_of(snapshot), Reader(snapshot, in_turn, self.plan.roots)
        if not self._cannot_breach(reader, scalars, low, high):
            return None
        if not (BY_RANK.issuperset(snapshot.columns) or self.staggered_idle(reader, snapshot, in_turn)):
            return None
        return self._advanced(state, reader, scalars, positive=complete and low > 0)

    def _cannot_breach(self, reader: Reader, scalars: Mapping[str, float], low: float, high: float) -> bool:
        """True if no rule without a baseline breaches."""
        asked, known = self.gathered, self.bounds(low, high)
        if self.of_coef:
            known = {**known, "coef": coef_bounds((reader.snapshot,))}
        for guard in self.guards:
            least, most = known.get(guard.column, UNKNOWN)
            if not (guard.low <= least and most <= guard.high):
                asked += guard.rules
        for name, given in scalars.items():
            of_scalar = self.of_scalars.get(name)
            if of_scalar is not None and not of_scalar.low <= given <= of_scalar.high:
                asked += of_scalar.rules
        for one in self.unbounded:
            column = one.series.column
            if is_scalar(column):
                value = scalars.get(scalar_name(column))
                least, most = NOTHING if value is None else (value, value)
            else:
                least, most = known.get(column, UNKNOWN)
            if not one.detector.cannot_breach(least, most):
                asked += (one,)
        return not any(breaches(one, reader) for one in asked)

    def staggered_idle(self, reader: Reader, snapshot: Snapshot, in_turn: InTurn) -> bool:
        """True if this step changes no idle rule whose series are judged in turns."""
        known: dict[str, tuple[float, float] | None] = {}
        for one in self._staggered:
            key = one.series.key
            if key not in known:
                known[key] = _bounds_of(in_turn.get(key), snapshot.columns.get(one.series.column))
            bounds = known[key]
            if bounds is None:
                continue
            if one.bank != NO_BANK or (not one.detector.cannot_breach(*bounds) and breaches(one, reader)):
                return False
        return True

    def bounds(self, low: float, high: float) -> Mapping[str, tuple[float, float]]:
        """Bounds on the columns of sites that follow from bounds on their norms: by column, (low, high)."""
        least, most = low / self._roots[0], high / self._roots[1]
        if least <= NORMAL:
            return {"norm": (low, high)}
        return {"norm": (low, high), "rms": (least * (1 - ROUNDING), most * (1 + ROUNDING))}

    def _advanced(
        self, state: EngineState, reader: Reader, scalars: Mapping[str, float], positive: bool
    ) -> Learned | None:
        """Every baseline after it learned this step; None when a score is too close to call.

        `positive`: every gradient is there, and none is 0. Then one logarithm serves all.
        """
        total, after, results = reader.snapshot.total_norm, list(state.baselines), {}
        logs = None
        if self._stacked and positive:
            norm = reader.snapshot.norm
            logs = stacked_logs(norm[None, : self._params], (total,), len(norm))[0]
        done = state.done if positive else ()
        for bank_input in self.bank_inputs:
            number, detector, wanted = bank_input.number, bank_input.detector, bank_input.result_wanted
            if bank_input.scalar and bank_input.scalar not in scalars:
                continue
            if done and done[number] and not wanted:
                continue
            before = after[number]
            if not wanted and bank_input.select is not None and (positive or bank_input.alone):
                x = log_of_scalar(total) if logs is None or bank_input.alone else logs[bank_input.select]
                score, after[number] = detector.advance_logs(before, x)
            elif (
                not wanted
                and bank_input.one_value
                and bank_input.select is None
                and (passed := detector.advance_scalars(before, (scalars,)))[0]
            ):
                after[number] = passed[1]
                continue
            elif (
                not wanted
                and bank_input.scalar
                and (x := _log_of(detector, scalars[bank_input.scalar])) is not None
            ):
                score, after[number] = detector.advance_logs(before, x)
            else:
                sample = bank_input.bank.sample(reader)
                if sample is None:
                    continue
                score, after[number] = detector.advance(before, sample)
                if wanted:
                    results[number] = BankResult(sample, score, before)
            if score is not None and bank_input.idle_may_breach(score):
                return None
        return Learned(tuple(after), reader, results)


class FastPaths(dict[AbstractSet[int], FastPath]):
    """The `FastPath` for each set of active rules, where one pays; `facts` are the numbers of rules on NaN and Inf.

    None for a set that contains such a rule, and at the first step with a set that is new.
    """

    MOST = 8

    def __init__(self, plan: Plan, facts: frozenset[int], unreached: frozenset[int] = frozenset()) -> None:
        super().__init__({frozenset(): FastPath(plan, unreached=unreached)})
        self._facts = facts
        self._plan = plan
        self._unreached = unreached
        self._seen: AbstractSet[int] = frozenset()  # at the last step that asked for one that is not there

    def __missing__(self, active: AbstractSet[int]) -> FastPath | None:
        if not self._facts.isdisjoint(active):
            return None
        if self._seen != active:  # laying one out costs as much as judging a step or two
            self._seen = active
            return None
        if len(self) == self.MOST:
            del self[next(key for key in self if key)]
        path = self[active] = FastPath(self._plan, active, self._unreached)
        return path


class FastPathsByStage(dict[AbstractSet[int], FastPaths]):
    """The `FastPaths` of the present stage, by the numbers of the rules that are not reached in it."""

    def __init__(self, plan: Plan, facts: frozenset[int]) -> None:
        first = plan.stages[0].unreached
        super().__init__({first: FastPaths(plan, facts, first)})
        self._plan = plan
        self._facts = facts

    def __missing__(self, unreached: frozenset[int]) -> FastPaths:
        self.clear()  # a stage that is over does not come again
        paths = self[unreached] = FastPaths(self._plan, self._facts, unreached)
        return paths


def coef_bounds(snapshots: Sequence[Snapshot]) -> tuple[float, float]:
    """The smallest and the largest factor applied to gradients before these steps; NaN if any factor is NaN."""
    distinct = {
        id(snapshot.coef): snapshot.coef for snapshot in snapshots
    }.values()  # untouched ones share theirs
    bounds = [(float(np.minimum.reduce(coef)), float(np.maximum.reduce(coef))) for coef in distinct]
    if len(bounds) == 1:
        return bounds[0]
    return float(np.min([low for low, _ in bounds])), float(np.max([high for _, high in bounds]))


def _log_of(detector: Detector, value: float) -> NDArray[np.float32] | None:
    """Argument of `advance_logs` for one value; None where the kind takes none, or not this one."""
    return detector.logs_of((value,)) if math.isfinite(value) else None


def scalars_of(snapshot: Snapshot) -> Mapping[str, float]:
    """The one-per-step values, by name; a value that was not observed is left out."""
    found = {**snapshot.scalars, "total_norm": snapshot.total_norm}
    if snapshot.loss_scale is not None:
        found["loss_scale"] = snapshot.loss_scale
    return found


NOTHING = (math.inf, -math.inf)
UNKNOWN = (math.nan, math.nan)


def stacked_logs(norm: NDArray[np.float32], totals: Sequence[float], size: int) -> NDArray[np.float32]:
    """float32[T, S + 1]: natural logarithms of norm[T, P] (0 for sites that are no parameters), then of each total."""
    count, params = norm.shape
    stack = np.empty((count, size + 1), np.float32)
    stack[:, :params] = norm
    if params < size:
        stack[:, params:size] = 1.0
    stack[:, size] = totals
    return np.log(stack, out=stack)


def _bounds_of(turn: Turn | None, column: Column | None) -> tuple[float, float] | None:
    """Smallest and largest value of the series in turn; None where none of them has one."""
    if turn is None or column is None:
        return None
    values = column.values[turn.sites][column.present[turn.sites]]
    return (float(values.min()), float(values.max())) if len(values) else None


def breaches(one: RulePlan, reader: Reader) -> bool:
    """True if a rule without a baseline may breach, by the values of its own series."""
    bounds = reader.own_bounds(one.series)
    if bounds is None or one.detector.cannot_breach(*bounds):
        return False
    sample = reader.sample(one.series, one.detector.columns)
    return sample is None or may_breach(one.detector, one.detector.score((), sample))
