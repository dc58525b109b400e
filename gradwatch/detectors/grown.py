"""Gradients that something has multiplied between the backward and the optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import STRICT, Exceeding, Sample, Scope, State, register_detector
from gradwatch.detectors.thresholds import Positive

ALIKE = 1e-5
"""Relative difference of two factors that are one: more than the rounding of float32 makes of a multiplication."""


@register_detector
@dataclass(frozen=True, slots=True)
class Grown(Exceeding):
    """coef > above: a gradient has grown between the backward and the step, by a factor or in a few parameters.

    Judged where at least half of the parameters have one factor: then something has multiplied them, or has left most
    alone and changed others. What is added to every gradient (noise, weight decay by hand, a projection such as
    PCGrad's) leaves each with a factor of its own, large where the gradient is small, and is no fault.
    """

    __pydantic_config__: ClassVar = STRICT
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
