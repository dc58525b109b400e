"""Rules and baselines in the form that the fast path reads at every step, prepared when they are bound.

Axes: S sites, K series of one bank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Detector, first_crossed, may_breach
from gradwatch.engine.rule_plan import Bank, Plan, RulePlan
from gradwatch.records.columns import COUNT_COLUMNS, scalar_name
from gradwatch.records.snapshot import FloatArray

UNBOUNDED = (math.nan, math.nan)
STACKED = ("norm", "total_norm")
"""The columns whose logarithms are taken together: S norms, then the total."""


class ColumnBound(NamedTuple):
    """Values of a column between `low` and `high` breach none of `rules`; for values beyond, each rule is asked."""

    column: str
    low: float
    high: float
    rules: tuple[RulePlan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BankInput:
    """Input of one bank; `select` its series in the stack of logarithms, None = elsewhere.

    `alone`: its only series is the total, which then keeps the precision of a Python float. `scalar`: its only
    series is this one-per-step value, which may not be there ("" = it has others). `first_crossed` is of its idle
    rules, None where it has none; `idle_parts` are their shares of K; `result_wanted` by a rule that is active.
    `one_value`: a single value of the step is all of its input, so that its kind may be asked whether it matters.
    `all_idle`: none of its rules is active, or suspended by one that is.
    """

    number: int
    bank: Bank
    detector: Detector
    first_crossed: Detector | None
    result_wanted: bool
    select: slice | NDArray[np.intp] | None
    alone: bool
    scalar: str
    idle_parts: tuple[slice, ...]
    one_value: bool
    all_idle: bool

    def idle_may_breach(self, score: FloatArray) -> bool:
        """True if one of the bank's idle rules may breach by these scores; its active rules do not count."""
        if self.first_crossed is None:
            return False
        if self.all_idle:
            return may_breach(self.first_crossed, score)
        return any(may_breach(self.first_crossed, score[part]) for part in self.idle_parts)


def is_proven(one: RulePlan) -> bool:
    """True if finite norms alone prove that a rule on counts of NaN and Inf does not breach."""
    return one.series.column in COUNT_COLUMNS and one.detector.cannot_breach(0.0, 0.0)


def is_bounded(one: RulePlan) -> bool:
    """True if bounds on a column bound a rule's series too: one series per site, or the column's only one."""
    return one.detector.safe is not None and one.series.owners is None


def column_bounds(rules: Iterable[RulePlan]) -> Iterable[ColumnBound]:
    """For each column that rules without a baseline read, the bounds within which none of them breaches."""

    def column(one: RulePlan) -> str:
        return one.series.column

    for name, found in groupby(sorted(rules, key=column), key=column):
        members = tuple(found)
        safe = [one.detector.safe or UNBOUNDED for one in members]
        yield ColumnBound(name, max(low for low, _ in safe), min(high for _, high in safe), members)


def bank_inputs(plan: Plan, active: AbstractSet[int], suspended: AbstractSet[int]) -> Iterable[BankInput]:
    """Inputs of the banks that learn at each step; `active` and `suspended` are numbers of rules.

    A suspended rule judges nothing, and so reads none of them.
    """
    for number, bank in enumerate(plan.banks):
        shares = [
            (n, yardstick)
            for n, one in enumerate(plan.rules)
            for yardstick in one.yardsticks
            if yardstick.bank == number
        ]
        idle = [yardstick.detector for n, yardstick in shares if n not in active | suspended]
        parts = tuple(yardstick.part for n, yardstick in shares if n not in active | suspended)
        wanted = any(n in active for n, _ in shares)
        if bank.judged_every == 1 and (wanted or any(segment.always for segment in bank.segments)):
            lowest = first_crossed(idle) if idle else None
            alone = len(bank.segments) == 1 and bank.segments[0].column == "total_norm"
            first = bank.segments[0]
            one_scalar = len(bank.segments) == 1 and first.scope == "scalar" and not alone
            scalar = scalar_name(first.column) if one_scalar else ""
            selection = _selection(bank, len(plan.sites))
            about = number, bank, bank.detector, lowest, wanted, selection, alone, scalar, parts
            yield BankInput(*about, one_value=alone or one_scalar, all_idle=len(idle) == len(shares))


def _selection(bank: Bank, size: int) -> slice | NDArray[Any] | None:
    """Positions of the series of a bank in the stack of logarithms; None when not all of them do."""
    places: list[NDArray[np.intp]] = []
    for segment in bank.segments:
        if segment.column not in STACKED or segment.owners is not None or not bank.detector.takes_logs:
            return None
        whole = np.arange(size) if segment.index is None else segment.index
        places.append(whole if segment.column == "norm" else np.array([size]))
    chosen = np.concatenate(places)
    start = int(chosen[0])
    if (chosen == np.arange(start, start + len(chosen))).all():
        return slice(start, start + len(chosen))
    return chosen
