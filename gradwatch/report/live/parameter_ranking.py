"""The parameters that need a look: not finite, at which a rule fires, or furthest from their own usual norm.

Axes: K recorded steps, the newest last; S sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwatch.report.live.live_view import ParameterLine

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
    last, usual = (
        norms_KS[-1, shown].astype(np.float64),
        usual_norms(norms_KS[:-1, shown], present_KS[:-1, shown]),
    )
    off = _factor(last, usual)
    at_rule = np.zeros(len(shown), bool)
    for sites in firing.values():
        at_rule |= sites[shown]
    order = np.lexsort((-off, ~at_rule, np.isfinite(last)))[:most]
    return [
        ParameterLine(
            names[shown[at]],
            float(last[at]),
            float(usual[at]),
            [float(each) for each in norms_KS[present_KS[:, shown[at]], shown[at]]],
            tuple(_rules(firing, int(shown[at]))),
        )
        for at in order.tolist()
    ]


def usual_norms(norms_KS: NDArray[np.float32], present_KS: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The median of the finite norms of each; NaN where there are fewer than LEAST_USUAL."""
    finite = np.where(present_KS & np.isfinite(norms_KS), norms_KS, np.nan).astype(np.float64)
    counts = np.isfinite(finite).sum(axis=0)
    usual = np.full(norms_KS.shape[1], np.nan)
    enough = counts >= LEAST_USUAL
    if enough.any():
        usual[enough] = np.nanmedian(finite[:, enough], axis=0)
    return usual


def _factor(last: NDArray[np.float64], usual: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factor by which a norm is off, up or down, at least 1; without a usual one the norm itself, below 1."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(usual > 0, last / usual, np.nan)
        factor = np.minimum(np.maximum(ratio, 1 / ratio), FURTHEST)
        alone = last / (1 + last)
    return np.where(np.isfinite(factor), factor, np.nan_to_num(alone, nan=1.0))


def _rules(firing: Mapping[str, NDArray[np.bool_]], site: int) -> Iterable[str]:
    return (rule for rule, sites in firing.items() if sites[site])
