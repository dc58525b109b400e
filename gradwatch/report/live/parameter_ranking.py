"""The parameters that need a look: not finite, at which a rule fires, or furthest from their own usual norm.

Axes: K recorded steps, the newest last; S sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwatch.report.live.view_records import ParameterLine

LEAST_USUAL = 8
"""Norms before the last that say what is usual."""
FURTHEST = 1e9
"""The factor that counts for a norm of 0, or an infinite one."""


def ranked(
    names: Sequence[str],
    norms_KS: NDArray[np.float32],
    present_KS: NDArray[np.bool_],
    firing: Mapping[str, NDArray[np.bool_]],
    candidates: Sequence[int],
    most: int,
) -> list[ParameterLine]:
    """The `most` of `candidates` (indices into S) that are furthest off, of those that had a gradient at the last step.

    `norms_KS` are NaN or Inf where the gradient was; `present_KS`: there was one.
    """
    shown = np.array([at for at in candidates if present_KS[-1, at]], np.int64)
    if not len(shown):
        return []
    last = norms_KS[-1, shown].astype(np.float64)
    usual = usual_norms(norms_KS[:-1, shown], present_KS[:-1, shown])
    lines = [
        ParameterLine(
            names[site],
            float(last[at]),
            float(usual[at]),
            [float(each) for each in norms_KS[present_KS[:, site], site]],
            tuple(rule for rule, sites in firing.items() if sites[site]),
        )
        for at, site in enumerate(shown.tolist())
    ]
    return worst_first(lines, most)


def worst_first(lines: Iterable[ParameterLine], most: int) -> list[ParameterLine]:
    """The `most` that need a look: not finite, then those at which a rule fires, then the furthest off.

    Where nothing is known of what is usual, the largest norm comes first.
    """
    return sorted(lines, key=_need)[:most]


def usual_norms(norms_KS: NDArray[np.float32], present_KS: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The median of the finite norms of each; NaN where there are fewer than LEAST_USUAL."""
    finite = np.where(present_KS & np.isfinite(norms_KS), norms_KS, np.nan).astype(np.float64)
    counts = np.isfinite(finite).sum(axis=0)
    usual = np.full(norms_KS.shape[1], np.nan)
    enough = counts >= LEAST_USUAL
    if enough.any():
        usual[enough] = np.nanmedian(finite[:, enough], axis=0)
    return usual


def _need(line: ParameterLine) -> tuple[bool, bool, float]:
    return math.isfinite(line.norm), not line.firing, -_factor(line)


def _factor(line: ParameterLine) -> float:
    """The factor by which a norm is off, up or down, at least 1; without a usual one the norm itself, below 1."""
    ratio = line.ratio
    if ratio >= 0:
        return min(max(ratio, 1 / ratio), FURTHEST) if ratio > 0 else FURTHEST
    return line.norm / (1 + line.norm) if math.isfinite(line.norm) else 1.0
