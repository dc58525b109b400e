"""A value against a constant: rails, vanishing, dead gradients, too large updates. No baseline, no warm-up.

Predicates are NaN-safe, each in the direction that is right for it: `above` takes NaN for larger than
anything (a rail must not be climbed by a NaN); the others say nothing of NaN, which is the business of
`nonfinite`. Where such a rule has told of the step, the engine asks `above` only for rules that act.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import (
    STRICT,
    Column,
    Comparison,
    Detector,
    Exceeding,
    ObservedColumn,
    Sample,
    Scope,
    State,
    register_detector,
)
from gradwatch.records.key_limits import Limits

Finite = Annotated[float, Limits(allow_inf_nan=False)]
Positive = Annotated[float, Limits(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Limits(gt=0, le=1)]
Dimensions = Annotated[int, Limits(ge=0)]


class OverThreshold(Detector):
    """Base of the kinds that fire where the score exceeds `threshold`, and clear below `clear_below` (default: it)."""

    __slots__ = ()

    threshold: float
    clear_below: float | None

    def __post_init__(self) -> None:
        if self.clear_below is not None and self.clear_below > self.threshold:
            raise ValueError("clear_below must not exceed threshold")

    @property
    def fires_at(self) -> float:
        """`threshold`."""
        return self.threshold

    @property
    def clears_at(self) -> float:
        """`clear_below`, or the threshold."""
        return self.threshold if self.clear_below is None else self.clear_below


@register_detector
@dataclass(frozen=True, slots=True)
class Above(OverThreshold):
    """value > threshold. A rail; use `spike` for a bound that adapts to the run."""

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "above"
    invertible: ClassVar[bool] = True

    threshold: Finite
    of: Column | ObservedColumn = "norm"
    clear_below: Finite | None = None

    def in_words(self, score: float) -> str:
        """The side of the threshold; NaN, which scores infinity, is on neither."""
        return f"above {self.threshold:.4g}" if score < math.inf else "not finite"

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The value; +inf where it is NaN (`not (x <= threshold)`); NaN where there was no sample."""
        values = np.where(np.isnan(sample.values), np.inf, sample.values.astype(np.float64))
        return np.where(sample.present, values, np.nan)

    def limit(self, state: State) -> NDArray[np.float64] | None:
        """The threshold itself, one value for all series: float64[1]."""
        return np.array([self.threshold])

    @property
    def safe(self) -> tuple[float, float]:
        """At or below the threshold."""
        return -math.inf, self.threshold


@register_detector
@dataclass(frozen=True, slots=True)
class Below(Detector):
    """value < threshold; `above_zero` leaves exact zeros to `all_zero`. Use `drop` for a relative fall."""

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "below"

    threshold: Finite
    of: Column | ObservedColumn = "norm"
    above_zero: bool = False
    clear_above: Finite | None = None

    def __post_init__(self) -> None:
        if self.clear_above is not None and self.clear_above < self.threshold:
            raise ValueError("clear_above must not be less than threshold")

    @property
    def comparison(self) -> Comparison:
        """Small values breach."""
        return "below"

    @property
    def fires_at(self) -> float:
        """`threshold`."""
        return self.threshold

    @property
    def clears_at(self) -> float:
        """`clear_above`, or the threshold."""
        return self.threshold if self.clear_above is None else self.clear_above

    def in_words(self, score: float) -> str:
        """The side of the threshold."""
        return f"below {self.threshold:.4g}"

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The value; NaN (no judgement) where it is NaN, missing, or zero under `above_zero`."""
        judged = sample.present & ~(sample.values == 0) if self.above_zero else sample.present
        return np.where(judged, sample.values.astype(np.float64), np.nan)

    @property
    def safe(self) -> tuple[float, float]:
        """At or above the threshold."""
        return self.threshold, math.inf


@register_detector
@dataclass(frozen=True, slots=True)
class Dead(Detector):
    """Nearly all elements of the gradient are zero: zero_fraction >= at_least.

    Default 0.9 on tensors of two or more dimensions: at 0.7 healthy GANs fire. Embeddings and experts have
    mostly zero gradients by nature: exclude them in the rule.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "dead"
    default_for: ClassVar[int] = 2
    scopes: ClassVar[tuple[Scope, ...]] = ("param",)

    of: Literal["zero_fraction"] = "zero_fraction"
    at_least: Fraction = 0.9
    clear_below: Fraction | None = None
    min_ndim: Dimensions = 2

    def __post_init__(self) -> None:
        if self.clear_below is not None and self.clear_below > self.at_least:
            raise ValueError("clear_below must not exceed at_least")

    @property
    def comparison(self) -> Comparison:
        """The bound itself breaches."""
        return "at_least"

    @property
    def fires_at(self) -> float:
        """`at_least`."""
        return self.at_least

    @property
    def clears_at(self) -> float:
        """`clear_below`, or `at_least`."""
        return self.at_least if self.clear_below is None else self.clear_below

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The fraction of zero elements, 0..1; NaN where there was no sample."""
        return np.where(sample.present, sample.values.astype(np.float64), np.nan)

    @property
    def safe(self) -> tuple[float, float]:
        """Below the bound."""
        return -math.inf, math.nextafter(self.at_least, -math.inf)


@register_detector
@dataclass(frozen=True, slots=True)
class UpdateRatio(Exceeding):
    """‖Δw‖/‖w‖ > above: a matrix moves too far from one step to the next, the best sign of a too high learning rate.

    Δw is all that happened to it between the two: the optimizer's step, and what the script itself has written.
    Matrices with ‖w‖ <= `min_weight_norm` are not judged: one that starts at zero (LoRA, zero-init residual
    branches) has no sensible ratio.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "update_ratio"
    default_for: ClassVar[int] = 2
    scopes: ClassVar[tuple[Scope, ...]] = ("param",)

    of: Literal["update_ratio"] = "update_ratio"
    above: Positive = 0.1
    clear_below: Positive | None = None
    min_weight_norm: Annotated[float, Limits(ge=0, allow_inf_nan=False)] = 0.1
    min_ndim: Dimensions = 2

    @property
    def columns(self) -> tuple[str, ...]:
        """The ratio, and the norm it is relative to."""
        return ("update_ratio", "weight_norm")

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The ratio; NaN where missing, not finite, or relative to almost nothing."""
        judged = sample.present & (sample.aux["weight_norm"] > self.min_weight_norm)
        return np.where(judged, sample.values.astype(np.float64), np.nan)

    @property
    def safe(self) -> tuple[float, float]:
        """At or below the bound."""
        return -math.inf, self.above
