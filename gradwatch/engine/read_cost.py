"""The cost of rules in memory reads: the cadence of each column, and the bytes that a step reads for all of them.

The read of every gradient for its norm comes on top; each step pays for that. Zeros and extremes of a gradient take one
pass over it, mean and deviation one, a histogram one; each of an optimizer's moments takes one, or two where it is read
together with the gradient. Overdue series, which are read besides (`gradwatch.engine.judged_steps.staggered_judging`),
are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.columns_needed import OF_UPDATES, Needs
from gradwatch.engine.rule_plan import Plan
from gradwatch.engine.selected_parameters import matching
from gradwatch.records.columns import CATALOGUE, COSTLY_COLUMNS, MODULE_COLUMNS, OPTIMIZER_STATE
from gradwatch.records.snapshot import BoolArray
from gradwatch.rules.rule_set import Histograms, Rule

MOMENTS, WEIGHT_MOMENTS = frozenset({"mean", "std"}), frozenset({"weight_mean", "weight_std"})
"""Columns of gradients and of weights that take a pass of their own, which moves each chunk to its mean."""
WITH_GRADIENT = tuple(one.name for one in CATALOGUE if one.reads == "optimizer state and gradient")
"""Columns of moments that are read together with the gradient."""
HISTOGRAM = "histogram"
"""Stands for histograms, which are no column."""
COMPARED = 2
"""Passes over a weight whose update is read: of the weight, and of its copy."""
MOST_STEPS = 5_000
"""Steps that are looked at, at most."""


class ColumnCost(NamedTuple):
    """A column that is read of whole tensors: `reads` names what is read; its cadences in words, its rules by id."""

    column: str
    reads: str
    cadences: tuple[str, ...]
    rules: tuple[str, ...]


class StepCost(NamedTuple):
    """Bytes that a step reads for norms, and beyond them: the mean and the most over the steps of one period."""

    norms: int
    mean: float
    most: int


def column_costs(rules: Iterable[Rule]) -> list[ColumnCost]:
    """The columns that cost reads of whole tensors, in the order of the catalogue."""
    asked = [rule for rule in rules if rule.enabled]
    found = []
    for one in CATALOGUE:
        of = [rule for rule in asked if one.name in rule.detect.columns] if one.name in COSTLY_COLUMNS else []
        if of:
            cadences = dict.fromkeys(cadence(rule) for rule in sorted(of, key=lambda rule: rule.every))
            found.append(ColumnCost(one.name, one.reads, tuple(cadences), tuple(rule.id for rule in of)))
    return found


def cadence(rule: Rule) -> str:
    """The cadence of a rule in words."""
    if rule.every == 1:
        return "all at each step"
    return f"each every {rule.every} steps" if rule.staggered else f"all every {rule.every} steps"


def histogram_costs(histograms: Histograms) -> list[ColumnCost]:
    """The cost of histograms, in the form of columns that rules ask for."""
    cadences = "all at each step" if histograms.every == 1 else f"each every {histograms.every} steps"
    reads = {"gradients": "gradient", "activations": "output"}
    return [
        ColumnCost(HISTOGRAM, reads[of], (cadences,), ("histograms:",)) for of in dict.fromkeys(histograms.of)
    ]


def step_cost(plan: Plan, element_bytes: NDArray[np.int64], histograms: Histograms | None = None) -> StepCost:
    """The bytes that the rules and histograms read of a model with `element_bytes[S]` per element of its sites.

    Where the cadences have no common period of at most 5,000 steps, mean and most are sums of those of each cadence
    alone: too much where two of them read a tensor at the same step, or never have their most at the same.
    """
    nbytes = plan.sites.numels * element_bytes
    params = np.array([kind == "param" for kind in plan.sites.kinds])
    needs = _with_histograms(plan.needs.only(COSTLY_COLUMNS - MODULE_COLUMNS), plan, histograms)
    norms, period = int(nbytes[params].sum()), math.lcm(*needs.cadences)
    if period <= MOST_STEPS:
        reads = [_bytes(plan, needs, step, nbytes) for step in range(period, 2 * period)]
        return StepCost(norms, float(np.mean(reads)), max(reads))
    alone = [_of_one_cadence(plan, needs.at(every), every, nbytes) for every in needs.cadences]
    return StepCost(norms, math.fsum(mean for mean, _ in alone), sum(most for _, most in alone))


def _with_histograms(needs: Needs, plan: Plan, histograms: Histograms | None) -> Needs:
    if histograms is None or "gradients" not in histograms.of:
        return needs
    chosen = matching(plan.sites, histograms.params)
    staggered = {**needs.staggered, HISTOGRAM: frozenset({histograms.every})}
    return Needs(needs.whole, staggered, {**needs.about, HISTOGRAM: chosen})


def _of_one_cadence(plan: Plan, needs: Needs, every: int, nbytes: NDArray[np.int64]) -> tuple[float, int]:
    """(mean, most) bytes a step of what is read at one cadence, each site once in so many steps."""
    steps = set(range(every, 2 * every))
    if every > MOST_STEPS:  # something is read, or copied for the step after, at steps of these residues only
        residues = {0, *plan.staggering.phases(every).tolist()}
        steps = {every + (residue - before) % every for residue in residues for before in (0, 1)}
    reads = [_bytes(plan, needs, step, nbytes) for step in steps]
    return sum(reads) / every, max(reads)


def _bytes(plan: Plan, needs: Needs, step: int, nbytes: NDArray[np.int64]) -> int:
    def due(columns: Iterable[str], step: int) -> BoolArray:
        found = np.zeros(len(nbytes), np.bool_)
        for name in columns:
            at = needs.due(name, step, plan.staggering)
            found = found if at is None else found | at
        return found

    values = frozenset(one.name for one in CATALOGUE if one.reads == "gradient") & COSTLY_COLUMNS
    passes = due(values - MOMENTS, step).astype(np.int64) + due(MOMENTS, step)
    for name in (*OPTIMIZER_STATE, *WITH_GRADIENT, HISTOGRAM):  # a moment is as large as its parameter
        passes += due({name}, step)
    updates = due(OF_UPDATES, step)
    passes += due(OF_UPDATES, step + 1)  # the copy
    passes += due(WEIGHT_MOMENTS, step)
    passes += np.where(updates, COMPARED, due({"weight_norm"}, step))
    return int((passes * nbytes).sum())
