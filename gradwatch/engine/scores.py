"""Scores of one rule on one step, by one yardstick or two.

Axes: K series of one rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Detector, breaches, clears
from gradwatch.records.snapshot import BoolArray, FloatArray


class Scored(NamedTuple):
    """Result of a rule on one step: `values[K]` read, `score[K]`, `breach[K]`; `second[K]` by its second yardstick."""

    values: FloatArray
    score: FloatArray
    breach: BoolArray
    second: FloatArray | None = None

    @property
    def judged(self) -> BoolArray:
        """bool[K]: the series that at least one yardstick has judged."""
        judged: BoolArray = ~np.isnan(self.score)
        return judged if self.second is None else judged | ~np.isnan(self.second)


def scored_by(
    detector: Detector, values: FloatArray, score: FloatArray, second: FloatArray | None = None
) -> Scored:
    """The result for these scores: a series breaches if it does by either yardstick."""
    breach = breaches(detector, score)
    if second is not None and detector.second is not None:
        breach = breach | breaches(detector.second, second)
    return Scored(values, score, breach, second)


def cleared(detector: Detector, scored: Scored) -> BoolArray:
    """bool[K]: the series that are healthy by every yardstick that has judged them, and judged by at least one."""
    clear = clears(detector, scored.score)
    if scored.second is None or detector.second is None:
        return clear
    both = (clear | np.isnan(scored.score)) & (
        clears(detector.second, scored.second) | np.isnan(scored.second)
    )
    return both & scored.judged


def worst_first(
    detector: Detector, scored: Scored, depths: NDArray[np.int64], involved: BoolArray
) -> NDArray[np.intp]:
    """Indices of the series involved, the worst score first; of equal scores the deepest series first."""
    chosen = np.flatnonzero(involved)
    if scored.second is None or detector.second is None:
        badness = scored.score[chosen] if detector.comparison == "below" else -scored.score[chosen]
    else:
        badness = -np.fmax(detector.exceeded(scored.score), detector.second.exceeded(scored.second))[chosen]
    return chosen[np.lexsort((-depths[chosen], badness))]


def exceeded_by(detector: Detector, scored: Scored, k: int) -> tuple[Detector, float]:
    """The yardstick whose threshold series k exceeds most, and the score by that yardstick."""
    if scored.second is None or detector.second is None:
        return detector, float(scored.score[k])
    first, second = (
        float(one.exceeded(score[k : k + 1])[0])
        for one, score in ((detector, scored.score), (detector.second, scored.second))
    )
    if second > first or np.isnan(first):
        return detector.second, float(scored.second[k])
    return detector, float(scored.score[k])
