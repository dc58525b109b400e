"""Gradients that something has multiplied between the backward and the optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import STRICT, Exceeding, Holds, Sample, Scope, State, register_detector
from gradwatch.detectors.thresholds import Positive

ALIKE = 1e-5
"""Relative difference of two factors that are one: more than the rounding of float32 makes of a multiplication."""
SAME = 1e-3
"""Relative difference of the factors of two steps that are one."""


@register_detector
@dataclass(frozen=True, slots=True)
class Grown(Exceeding):
    """coef > above: a gradient has grown between the backward and the step, by a factor or in a few parameters.

    Judged where at least half of the parameters have one factor: then something has multiplied them, or has left most
    alone and changed others. What is added to every gradient (noise, manual weight decay, a projection such as
    PCGrad's) leaves each with a factor of its own, large where the gradient is small, and is no fault.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "grown"
    elementwise: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("param",)

    of: Literal["coef"] = "coef"
    above: Positive = 3.0
    clear_below: Positive | None = None

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The factor; 0 where each parameter has its own; NaN where it is missing or not finite."""
        coef = np.where(sample.present, sample.values.astype(np.float64), np.nan)
        known = np.sort(coef[np.isfinite(coef)])
        if not len(known):
            return np.full(len(coef), np.nan)
        middle = known[(len(known) - 1) // 2]
        alike = int(np.count_nonzero(np.abs(known - middle) <= ALIKE * middle))
        one_factor = 2 * alike >= len(known) and (alike > 1 or len(known) == 1 or middle == 1)
        return np.where(np.isfinite(coef), coef if one_factor else 0.0, np.nan)

    @property
    def safe(self) -> tuple[float, float]:
        """At or below the bound."""
        return -np.inf, self.above


class ScaledState(NamedTuple):
    """Of K series: the `last` factor, float64[K]; 1 = none yet."""

    last: NDArray[np.float64]


@register_detector
@dataclass(frozen=True, slots=True)
class Scaled(Holds):
    """scaled_by is the same as at the step before, and not 1.

    A manual clip has another factor at every step. Score: 1 where it is the same, else 0; it breaches at 1.
    """

    __pydantic_config__: ClassVar[object] = STRICT
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
        same = np.abs(values - state.last) <= SAME * np.abs(state.last)
        other_than_one = np.abs(values - 1) > SAME
        return np.where(known, (same & other_than_one).astype(np.float64), np.nan)

    def learn(self, state: Any, sample: Sample) -> State:
        """The last factor, with this one."""
        return ScaledState(np.where(_known(sample), sample.values.astype(np.float64), state.last))


def _known(sample: Sample) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = sample.present & np.isfinite(sample.values)
    return known
