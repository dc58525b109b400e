"""Gradients that do not arrive, are all zero, or move nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import STRICT, Comparison, Detector, Sample, Scope, State, register_detector
from gradwatch.detectors.thresholds import Dimensions, Positive
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray, FloatArray


class SeenState(NamedTuple):
    """`seen[K]`: a gradient has arrived at least once."""

    seen: NDArray[np.bool_]


class WaitState(NamedTuple):
    """`waited[K]` int32: steps so far without any gradient; -1 once one has arrived."""

    waited: NDArray[np.int32]


def _counted(sample: Sample) -> BoolArray:
    """bool[K]: where the number of calls is known."""
    known: BoolArray = sample.present & np.isfinite(sample.values)
    return known


@register_detector
@dataclass(frozen=True, slots=True)
class Stale(Detector):
    """No gradient in a step, after having had one; with the default `for`, three steps in a row.

    Use `never` for parameters that have not had one at all. Experts and intended freezes: exclude by group.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "stale"
    default_for: ClassVar[int] = 3
    scopes: ClassVar[tuple[Scope, ...]] = ("param", "group")

    of: Literal["calls"] = "calls"

    @property
    def fires_at(self) -> float:
        """Scores are 0 or 1; anything above 0 breaches."""
        return 0.0

    def init(self, size: int) -> SeenState:
        """Nothing seen yet."""
        return SeenState(np.zeros(size, np.bool_))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """1.0 where a gradient is missing that used to come, 0.0 where it came, NaN where none ever did."""
        came = sample.values > 0
        judged = _counted(sample) & (cast(SeenState, state).seen | came)
        return np.where(judged, (~came).astype(np.float64), np.nan)

    def learn(self, state: State, sample: Sample) -> SeenState:
        """Remember who has had a gradient."""
        return SeenState(cast(SeenState, state).seen | (_counted(sample) & (sample.values > 0)))

    def done(self, state: State) -> bool:
        """True if every series has had a gradient."""
        return bool(cast(SeenState, state).seen.all())

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; nothing to say while every gradient comes."""
        if float(sample.values.min()) > 0 and bool(state[0].all()):
            return None, state
        return self.score(state, sample), self.learn(state, sample)


@register_detector
@dataclass(frozen=True, slots=True)
class Never(Detector):
    """No gradient at all in the first `within` steps: a parameter outside the graph, or frozen."""

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "never"
    scopes: ClassVar[tuple[Scope, ...]] = ("param", "group")

    of: Literal["calls"] = "calls"
    within: Annotated[int, Limits(ge=1)] = 20

    @property
    def comparison(self) -> Comparison:
        """The step number `within` itself breaches."""
        return "at_least"

    @property
    def fires_at(self) -> float:
        """`within`."""
        return float(self.within)

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the counts, which do not depend on the bound."""
        return (self.kind, self.of)

    def init(self, size: int) -> WaitState:
        """No step waited yet."""
        return WaitState(np.zeros(size, np.int32))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """Steps without any gradient so far, this one included; 0 once one has arrived."""
        waited = cast(WaitState, state).waited
        waiting = (waited >= 0) & ~(sample.values > 0)
        return np.where(_counted(sample), np.where(waiting, waited + 1.0, 0.0), np.nan)

    def learn(self, state: State, sample: Sample) -> WaitState:
        """Count the step; the count stops rising at 2^31 - 1 and is over once a gradient arrives."""
        waited = cast(WaitState, state).waited
        longer = np.where(waited >= 0, np.minimum(waited, 2**31 - 2) + 1, waited)
        after = np.where(sample.values > 0, -1, longer)
        return WaitState(np.where(_counted(sample), after, waited).astype(np.int32))

    def done(self, state: State) -> bool:
        """True if every series has had a gradient."""
        return bool((cast(WaitState, state).waited < 0).all())

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; nothing to report once every series has had a gradient."""
        if int(state[0].max()) < 0:
            return None, state
        return self.score(state, sample), self.learn(state, sample)


@register_detector
@dataclass(frozen=True, slots=True)
class AllZero(Detector):
    """Every element of a gradient is exactly zero while others are not.

    Read from the norm: it is exact wherever float32 can hold it, so norm == 0 means max|g| == 0 at no cost.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "all_zero"
    default_for: ClassVar[int] = 5
    elementwise: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("param", "group")

    of: Literal["norm", "max_abs", "norm_local"] = "norm"
    min_ndim: Dimensions = 2

    @property
    def fires_at(self) -> float:
        """Scores are 0 or 1; anything above 0 breaches."""
        return 0.0

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """1.0 where all elements are zero and another series has some that are not; NaN where no sample."""
        zero = sample.values == 0
        others = bool((sample.present & (sample.values > 0)).any())
        return np.where(sample.present, (zero & others).astype(np.float64), np.nan)

    @property
    def safe(self) -> tuple[float, float]:
        """Not zero."""
        return math.ulp(0.0), math.inf

    def cannot_breach(self, low: float, high: float) -> bool:
        """True if no value is zero, or all are."""
        return low > 0 or high == 0


@register_detector
@dataclass(frozen=True, slots=True)
class Stuck(Detector):
    """A gradient arrives but the weights do not move: ‖Δw‖/‖w‖ < below.

    Finds a learning rate of 0 and a parameter the optimizer does not own.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "stuck"
    default_for: ClassVar[int] = 2
    scopes: ClassVar[tuple[Scope, ...]] = ("param",)

    of: Literal["update_ratio"] = "update_ratio"
    below: Positive = 1e-9
    min_weight_norm: Annotated[float, Limits(ge=0, allow_inf_nan=False)] = 1e-6
    min_ndim: Dimensions = 2

    @property
    def columns(self) -> tuple[str, ...]:
        """The ratio; the gradient's norm and the weight's, which must not be zero."""
        return ("update_ratio", "norm", "weight_norm")

    @property
    def comparison(self) -> Comparison:
        """Small ratios breach."""
        return "below"

    @property
    def fires_at(self) -> float:
        """`below`."""
        return self.below

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The ratio; NaN where missing, without a gradient, or relative to a zero weight."""
        moved_by: BoolArray = (sample.aux["norm"] > 0) & (sample.aux["weight_norm"] > self.min_weight_norm)
        return np.where(sample.present & moved_by, sample.values.astype(np.float64), np.nan)

    @property
    def safe(self) -> tuple[float, float]:
        """At or above the bound."""
        return self.below, math.inf
