"""The parameter that moved most against its own past: an Event about a total over parameters names it.

Axes: P parameters that have a baseline of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import State
from gradwatch.engine.baseline_bounds import part_of
from gradwatch.engine.rule_plan import Plan, RulePlan
from gradwatch.engine.series import Series
from gradwatch.records.snapshot import Snapshot

OF_ALL = frozenset({"total_norm", "norm", "rms"})
"""Columns whose total is made of all parameters' norms."""
APART = 4.0
"""Named is what moved by this factor more than the median parameter: else all of them moved, and none is at fault.

Where all fall or rise alike, the norm of a bias of small batches is easily twice or three times off its own level.
"""
PART = 0.01
"""Least share in the sum of squares, now or usually, of a parameter that can have moved the total."""


def culprit(plan: Plan, baselines: tuple[State, ...], one: RulePlan, snapshot: Snapshot) -> str:
    """The parameter whose norm moved most against its usual level, in the direction of the total; "" if there is none.

    A usual level is what a rule with `scope: param` has learned of each parameter's norm: a rule of the same kind as
    the one on the total (a `spike` follows what `drift` reports), else of any kind.
    """
    if one.series.column not in OF_ALL or one.series.scope not in ("total", "scalar"):
        return ""
    of_total = np.ones(len(snapshot.norm), np.bool_)
    if one.series.index is not None:
        of_total[:] = False
        of_total[one.series.index] = True
    for series, level in (*_levels(plan, baselines, one.detector.kind), *_levels(plan, baselines)):
        own = slice(None) if series.index is None else series.index
        norm = np.where(of_total, snapshot.norm, np.float32(np.nan))[own].astype(np.float64)
        found = _most_moved(norm, level)
        if found is not None:
            return series.names[found]
    return ""


def may_have_moved(snapshot: Snapshot, name: str) -> bool:
    """True if a parameter has a relevant share in a large total: at least `PART` of the sum of squares."""
    norm = snapshot.norm.astype(np.float64)
    own = float(norm[snapshot.sites.names.index(name)])
    return own**2 >= PART * float(np.sum(np.square(norm), where=np.isfinite(norm)))


def usual_norms(plan: Plan, baselines: tuple[State, ...]) -> dict[str, float]:
    """By parameter name, the usual norm of its gradient, where a rule has learned one."""
    found: dict[str, float] = {}
    for series, level in _levels(plan, baselines):
        known = np.isfinite(level) & (level > 0)
        names = (name for name, here in zip(series.names, known, strict=True) if here)
        found = dict(zip(names, level[known].tolist(), strict=True)) | found  # sync: numpy
    return found


def usual_loss(plan: Plan, baselines: tuple[State, ...]) -> float:
    """The usual loss; NaN if no rule has learned one (`loss_spike`), or if it is not positive."""
    for bank, state in zip(plan.banks, baselines, strict=True):
        for series, part in zip(bank.segments, bank.parts, strict=True):
            if series.column == "loss" and bank.detector.elementwise:
                level = bank.detector.usual(part_of(bank.detector, state, part), 0.0)
                if level is not None and 0 < float(level[0]) < math.inf:  # sync: numpy
                    return float(level[0])  # sync: numpy
    return math.nan


def _levels(
    plan: Plan, baselines: tuple[State, ...], kind: str = ""
) -> Iterator[tuple[Series, NDArray[np.float64]]]:
    """The series of parameters' norms that have a baseline, of this kind only, and the usual level of each."""
    for bank, state in zip(plan.banks, baselines, strict=True):
        for series, part in zip(bank.segments, bank.parts, strict=True):
            if series.column == "norm" and series.scope == "param" and bank.detector.elementwise:
                own = part_of(bank.detector, state, part)
                wanted = bank.detector.kind == kind if kind else bank.detector.invertible
                level = bank.detector.level(own) if wanted else None
                if level is not None:
                    yield series, level


def _most_moved(norm: NDArray[np.float64], level: NDArray[np.float64]) -> int | None:
    known = np.isfinite(level) & np.isfinite(norm) & (level > 0)
    if not known.any():
        return None
    usual, now = np.where(known, level, 0.0), np.where(known, norm, 0.0)
    before, after = float(np.dot(usual, usual)), float(np.dot(now, now))
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = np.log(now / usual)
    moved = np.where(known, moved if after > before else -moved, -np.inf)
    shares = np.square(now) / after if after > before else np.square(usual) / before
    best = int(np.argmax(np.where(shares >= PART, moved, -np.inf)))
    apart = float(moved[best]) - float(np.median(moved[known]))
    return best if moved[best] > math.log(APART) and apart > math.log(APART) else None
