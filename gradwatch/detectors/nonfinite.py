"""NaN, Inf and norms beyond float32: facts, not statistics. No baseline, no warm-up."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import STRICT, Detector, ObservedColumn, Sample, State, register_detector

NonFiniteColumn = Literal[
    "norm",
    "total_norm",
    "norm_local",
    "grad_output_norm",
    "grad_input_norm",
    "running_mean_norm",
    "running_var_min",
    "running_var_max",
]


LARGEST = sys.float_info.max


class _Fact(Detector):
    """A kind whose score is 1 where the fact holds and 0 where it does not."""

    __slots__ = ()
    finiteness: ClassVar[bool] = True

    @property
    def fires_at(self) -> float:
        """Scores are 0 or 1; anything above 0 breaches."""
        return 0.0


def _flag(sample: Sample, holds: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.where(sample.present, holds.astype(np.float64), np.nan)


@register_detector
@dataclass(frozen=True, slots=True)
class NonFinite(_Fact):
    """An element of the gradient is NaN or Inf.

    `of: norm` looks at elements (the `nonfinite` count), so it never fires on a norm that merely overflows
    float32: that is `norm_overflow`. For the other columns the value itself is judged. `values` restricts
    it to NaN or to Inf where the counts tell them apart. Score: 1 where it holds, else 0; the value is the
    count.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "nonfinite"

    of: NonFiniteColumn = "norm"
    values: tuple[Literal["nan", "inf"], ...] = ("nan", "inf")

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values: name at least one of nan, inf")

    @property
    def columns(self) -> tuple[str, ...]:
        """Counts of elements for `norm`; the column itself otherwise."""
        if self.of != "norm":
            return (self.of,)
        wanted = frozenset(self.values)
        return ("nonfinite",) if len(wanted) == 2 else ("nan_count" if "nan" in wanted else "inf_count",)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """1.0 where an element is NaN or Inf, 0.0 where none is, NaN where there was no sample."""
        if self.of == "norm":
            return _flag(sample, ~(sample.values <= 0))
        found = np.zeros(len(sample.values), np.bool_)
        if "nan" in self.values:
            found |= np.isnan(sample.values)
        if "inf" in self.values:
            found |= np.isinf(sample.values)
        return _flag(sample, found)

    @property
    def safe(self) -> tuple[float, float]:
        """No element counted, or a finite value."""
        return (-math.inf, 0.0) if self.of == "norm" else (-LARGEST, LARGEST)


@register_detector
@dataclass(frozen=True, slots=True)
class NormOverflow(_Fact):
    """The true norm exceeds float32 although every element is finite. NaN or Inf elements: `nonfinite`."""

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "norm_overflow"

    of: Literal["norm"] = "norm"

    @property
    def columns(self) -> tuple[str, ...]:
        """The flag that the capture sets when it re-read the norm in float64."""
        return ("norm_overflow",)

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """1.0 where the norm overflowed, 0.0 where not, NaN where there was no sample."""
        return _flag(sample, ~(sample.values <= 0))

    @property
    def safe(self) -> tuple[float, float]:
        """No overflow flagged."""
        return -math.inf, 0.0


@register_detector
@dataclass(frozen=True, slots=True)
class LossNonFinite(_Fact):
    """The loss, or an observed value, is NaN or Inf.

    The loss is the value `backward` started from, or what `gw.observe(loss=…)` gave. One NaN is one incident: on a step
    on which a rule of kind `nonfinite` on gradients fires, of this rule's severity at least, this one has nothing to
    say of the loss, unless it has an action.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "loss_nonfinite"

    of: Literal["loss"] | ObservedColumn = "loss"

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """1.0 where the value is NaN or Inf, 0.0 where finite, NaN where there is none."""
        return _flag(sample, ~np.isfinite(sample.values))

    @property
    def safe(self) -> tuple[float, float]:
        """A finite value."""
        return -LARGEST, LARGEST
