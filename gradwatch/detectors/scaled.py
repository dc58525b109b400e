"""All gradients multiplied by one and the same factor, step after step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import STRICT, Holds, Sample, Scope, State, register_detector

ALIKE = 1e-3
"""Relative difference of two factors that are one."""


class ScaledState(NamedTuple):
    """Of K series: the `last` factor, float64[K]; 1 = none yet."""

    last: NDArray[np.float64]


@register_detector
@dataclass(frozen=True, slots=True)
class Scaled(Holds):
    """scaled_by is the same as at the step before, and not 1.

    A clip by hand has another factor at every step. Score: 1 where it is the same, else 0; it breaches at 1.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ClassVar[str] = "scaled"
    default_for: ClassVar[int] = 3
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["scaled_by"] = "scaled_by"

    def init(self, size: int) -> State:
        """No factor yet."""
        return ScaledState(np.ones(size))

    def score(self, state: Any, sample: Sample) -> NDArray[np.float64]:
        """float64[K]: 1 or 0; NaN where there is no factor."""
        known, values = _known(sample), sample.values.astype(np.float64)
        same = np.abs(values - state.last) <= ALIKE * np.abs(state.last)
        other_than_one = np.abs(values - 1) > ALIKE
        return np.where(known, (same & other_than_one).astype(np.float64), np.nan)

    def learn(self, state: Any, sample: Sample) -> State:
        """The last factor, with this one."""
        return ScaledState(np.where(_known(sample), sample.values.astype(np.float64), state.last))


def _known(sample: Sample) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = sample.present & np.isfinite(sample.values)
    return known
