"""The interface of detectors, and the registry of kinds.

A detector is a frozen dataclass of hyper-parameters with pure methods over K series at once:
`init(size) -> state`, `score(state, sample) -> float64[K]`, `learn(state, sample) -> state`,
`limit(state) -> [K] | None`, `usual(state, sigmas) -> [K] | None`. The threshold is a field of the dataclass,
but the detector never applies it: the engine does, through `fires_at`, `comparison` and `clears_at`. So one
baseline serves many rules.

Axes: K series (one per site, per group, or a single one over a total or a scalar).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.columns import OBSERVED, SCALAR_COLUMNS, scalar_name
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray, FloatArray
from gradwatch.runtime.registry import Registry

State = tuple[Any, ...]
"""What `init` returns: a NamedTuple of arrays whose last axis is K (empty for a kind without memory)."""

Scope = Literal["param", "group", "total"]
Comparison = Literal["above", "at_least", "below"]
Column = Literal[
    "norm",
    "total_norm",
    "norm_applied",
    "coef",
    "norm_local",
    "rms",
    "max_abs",
    "min",
    "max",
    "mean",
    "std",
    "nonfinite",
    "zero_fraction",
    "weight_norm",
    "weight_mean",
    "weight_std",
    "update_norm",
    "update_ratio",
    "moment_norm",
    "second_moment_rms",
    "second_moment_near_zero",
    "moment_cosine",
    "calls",
    "grad_output_norm",
    "grad_input_norm",
    "activation_mean",
    "activation_std",
    "activation_min",
    "activation_max",
    "activation_near_zero",
    "activation_saturation",
    "input_mean",
    "input_std",
    "input_min",
    "input_max",
    "input_near_zero",
    "running_mean_norm",
    "running_var_min",
    "running_var_max",
    "loss",
    "lr",
    "loss_scale",
    "noise_scale",
    "scaler_skip",
    "unowned",
    "uncleared",
    "discarded",
    "idle_clips",
    "clipped_scale",
    "scaled_by",
    "clip_ratio",
]
"""Every column of the catalogue that `of:` can name in `above` and `below`."""


def _no_column(of: str) -> str:
    name = scalar_name(of)
    if name in SCALAR_COLUMNS:
        from pydantic_core import PydanticCustomError  # not at the top: see records/key_limits.py

        raise PydanticCustomError("measured", "'{name}' is a column: write `of: {name}`", {"name": name})
    return of


OBSERVED_PATTERN = rf"^{re.escape(OBSERVED)}\S{{1,64}}$"
ObservedColumn = Annotated[str, Limits(pattern=OBSERVED_PATTERN, check=_no_column)]
"""A value that the script gives to `observe`: its name after `observed.`, one value per step."""

NormColumn = Literal[
    "norm",
    "total_norm",
    "norm_applied",
    "norm_local",
    "rms",
    "max_abs",
    "std",
    "weight_norm",
    "weight_std",
    "update_norm",
    "update_ratio",
    "moment_norm",
    "second_moment_rms",
    "grad_output_norm",
    "grad_input_norm",
    "activation_std",
    "input_std",
    "running_mean_norm",
    "running_var_min",
    "running_var_max",
]
"""Columns that are positive by nature, so that their logarithm is a fair scale."""

STRICT: Mapping[str, Any] = MappingProxyType({"extra": "forbid"})
"""pydantic configuration of every built-in detector: an unknown key in `detect:` is an error."""


MARGIN = 1e-3
"""Of logarithms: far more than the rounding of float32 and of exp."""


class Sample(NamedTuple):
    """One step of K series: `values[K]`, `present[K]` (False = no sample), and the other columns by name.

    `aux` holds `[K]` arrays of the columns a kind listed after the first in `columns`; NaN where unknown.
    """

    values: FloatArray
    present: BoolArray
    aux: Mapping[str, FloatArray] = MappingProxyType({})


class Detector:
    """Base of the built-in kinds: the facts a rule needs, and the behaviour of a kind without memory.

    Class-level facts: `kind` its name in `detect:`; `default_for` breaching samples before it fires;
    `has_baseline` whether warm-up and half-life mean anything; `invertible` whether `limit` exists;
    `elementwise` whether each series is judged alone (then series of many rules may be stacked); `scopes`
    it can be used with; `in_depth_order` whether it makes one series of all its sites, first to last (then
    `Sample.values` holds the sites and scores are `[1]`); `finiteness` whether it judges NaN and Inf: such
    a rule acts before its `for` is met and is evaluated on provisional snapshots too; `takes_logs` whether
    it has `advance_logs`; `finishes` whether `done` holds of any samples, not of positive ones alone.
    """

    __slots__ = ()

    kind: ClassVar[str]
    default_for: ClassVar[int] = 1
    has_baseline: ClassVar[bool] = False
    invertible: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    finiteness: ClassVar[bool] = False
    in_depth_order: ClassVar[bool] = False
    takes_logs: ClassVar[bool] = False
    finishes: ClassVar[bool] = False
    scopes: ClassVar[tuple[Scope, ...]] = ("param", "group", "total")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have a kind derived from another one, with an `advance_logs` of its own, judge many steps by that too."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "advance_logs" in own and "advance_many_logs" not in own:
            cls.advance_many_logs = Detector.advance_many_logs  # type: ignore[method-assign]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads; the first gives `Sample.values`, the others `Sample.aux`."""
        return (str(getattr(self, "of", "norm")),)

    @property
    def comparison(self) -> Comparison:
        """Comparison of a score with its threshold: `above` score > threshold, `at_least` >=, `below` <."""
        return "above"

    @property
    def fires_at(self) -> float:
        """The threshold of the score."""
        raise NotImplementedError

    @property
    def clears_at(self) -> float:
        """The score at which a firing rule starts to be quiet (default: where it fires)."""
        return self.fires_at

    @property
    def samples_needed(self) -> int:
        """Samples of a series before it can be judged: the warm-up, and what is needed to compare with; 0 = none."""
        return int(getattr(self, "warmup", 0))

    @property
    def second(self) -> Detector | None:
        """A second yardstick for the same series: what breaches by either of them breaches. None = there is none."""
        return None

    def exceeded(self, score: FloatArray) -> FloatArray:
        """[K]: how far each score is towards its threshold, which is at 1: comparable between two yardsticks."""
        return score / self.fires_at

    def in_words(self, score: float) -> str:
        """A score for people, to follow "the value is"."""
        return f"at a score of {score:.4g}"

    def baseline_key(self) -> tuple[Any, ...]:
        """Two detectors with equal keys learn the same from the same samples and may share a state."""
        return (self.kind, *(getattr(self, f.name) for f in fields(self)))  # type: ignore[arg-type]

    def init(self, size: int) -> State:
        """The state of `size` series that have seen nothing, in arrays that the caller may fill."""
        return ()

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """float64[K]: how unusual each sample is; NaN = no judgement (missing, warming up, not for it)."""
        raise NotImplementedError

    def shown(self, state: State, sample: Sample) -> FloatArray:
        """[K]: the values that `score` is about, for an Event."""
        return sample.values

    def learn(self, state: State, sample: Sample) -> State:
        """The state after it; missing and non-finite samples change nothing. Never writes `state`."""
        return state

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """`(score(…), learn(…))` in one pass.

        A score of None says that no series breaches, neither here nor at any threshold that is harder to
        reach.
        """
        return self.score(state, sample), self.learn(state, sample)

    def advance_logs(self, state: State, x: NDArray[np.float32]) -> tuple[FloatArray | None, State]:
        """As `advance`, where every sample is present, positive and finite: `x[K]` is ln value.

        Only asked of a kind with `takes_logs`, so that kinds over one column share its logarithm.
        """
        raise NotImplementedError

    def advance_many_logs(self, state: State, x: NDArray[np.float32]) -> tuple[int, State]:
        """As `advance_logs` on each of x[T, K] in turn: the number of the first that breach nowhere, the state then.

        Equal to one at a time bit by bit. A kind that can spare the calls in between overrides it.
        """
        for t, each in enumerate(x):
            score, after = self.advance_logs(state, each)
            if score is not None and may_breach(self, score):
                return t, state
            state = after
        return len(x), state

    def logs_of(self, values: Sequence[float]) -> NDArray[np.float32] | None:
        """float32[T]: of T finite one-per-step values what `advance_many_logs` takes; None where it takes none."""
        return None

    def done(self, state: State) -> bool:
        """True if positive samples (any, where it `finishes`) can neither breach nor teach; they are not shown."""
        return False

    def indifferent(self, state: State, scalar: Callable[[str], float | None]) -> bool:
        """True if a step with these one-per-step values can neither breach nor teach anything; asked of one series.

        False = not known; `scalar(name)` gives None where a value was not observed.
        """
        return False

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """As `advance` of steps with these one-per-step values in turn, of which a series is the only input.

        Returns the number of the first that surely breach nowhere, and the state then. Here: those that are
        indifferent. A kind that reads several such values overrides it.
        """
        for count, values in enumerate(steps):
            if not self.indifferent(state, values.get):
                return count, state
        return len(steps), state

    def limit(self, state: State) -> NDArray[np.float64] | None:
        """float64[K]: the value whose score is exactly the threshold (inf while warming up), or None."""
        return None

    def usual(self, state: State, sigmas: float) -> NDArray[np.float64] | None:
        """float64[K]: the value `sigmas` deviations above the baseline (inf while warming up); None without one."""
        return None

    def level(self, state: State) -> NDArray[np.float64] | None:
        """float64[K]: the value that a sample is compared with (inf or 0 while warming up); None without a baseline."""
        return self.usual(state, 0.0)

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> State:
        """The state with the series in `mask[K]` learning anew.

        With `keep_judging` the old baseline goes on judging until the new one is ready (a change that may
        be a fault, such as a jump of the learning rate); without, those series are blind until warmed up
        again.
        """
        return state

    @property
    def safe(self) -> tuple[float, float] | None:
        """The values that cannot breach, whatever was learned, both ends included; None = not an interval."""
        return None

    def cannot_breach(self, low: float, high: float) -> bool:
        """True if no value in [low, high] can breach, whatever was learned; False when either is NaN."""
        safe = self.safe
        return safe is not None and safe[0] <= low and high <= safe[1]


class Exceeding(Detector):
    """Base of the kinds that fire where the score exceeds `above`, and clear below `clear_below` (default: `above`)."""

    __slots__ = ()

    above: float
    clear_below: float | None

    def __post_init__(self) -> None:
        if self.clear_below is not None and self.clear_below > self.above:
            raise ValueError("clear_below must not exceed above")

    @property
    def fires_at(self) -> float:
        """`above`."""
        return self.above

    @property
    def log_surely_below(self) -> float:
        """A logarithm less than this is one of a score below `above`, whatever float32 and exp have rounded."""
        return math.log(self.above) - MARGIN

    @property
    def clears_at(self) -> float:
        """`clear_below`, or `above`."""
        return self.above if self.clear_below is None else self.clear_below


class Holds(Detector):
    """Base of the kinds whose score is 1 where something holds."""

    __slots__ = ()

    @property
    def comparison(self) -> Comparison:
        """1 itself breaches."""
        return "at_least"

    @property
    def fires_at(self) -> float:
        """1."""
        return 1.0


ENTRY_POINT_GROUP = "gradwatch.detectors"

DETECTORS: Registry[type[Detector]] = Registry("detector kind", ENTRY_POINT_GROUP)
"""Every kind registered so far, by its name in `detect:`."""

KNOWN_NOT_BUILT: frozenset[str] = frozenset()
"""Kinds of the rule language that this version cannot evaluate yet."""

D = TypeVar("D", bound=type[Detector])


def register_detector(cls: D) -> D:
    """Make `cls.kind` usable in `detect:`; a second class of the same kind raises `GradwatchError`."""
    DETECTORS.register(cls.kind, cls)
    return cls


def find_detector(kind: str) -> type[Detector] | None:
    """The class of a kind, built in or from an installed package's entry point; None when there is none."""
    return DETECTORS.find(kind, register_detector)


def rule_keys(cls: type[Detector]) -> frozenset[str]:
    """The fields of a kind set by keys of the rule (`warmup`, `half_life`), never inside `detect:`."""
    return frozenset(f.name for f in fields(cls) if f.metadata.get("rule_key"))  # type: ignore[arg-type]


def breaches(detector: Detector, score: FloatArray) -> BoolArray:
    """bool[K]: which scores breach the detector's threshold; NaN (no judgement) never does."""
    score = np.asarray(score, np.float64)  # a float32 array would round the threshold to float32
    if detector.comparison == "above":
        return score > detector.fires_at
    if detector.comparison == "at_least":
        return score >= detector.fires_at
    return score < detector.fires_at


def clears(detector: Detector, score: FloatArray) -> BoolArray:
    """bool[K]: which scores are at the clear level or on the healthy side of it; NaN never is."""
    score = np.asarray(score, np.float64)
    if detector.comparison == "above":
        return score <= detector.clears_at
    if detector.comparison == "at_least":
        return score < detector.clears_at
    return score >= detector.clears_at


def first_crossed(detectors: Sequence[Detector]) -> Detector:
    """Of detectors that compare alike, the one whose threshold is the first to be crossed."""
    choose = max if detectors[0].comparison == "below" else min
    return choose(detectors, key=lambda one: float(one.fires_at))


def advance_one(detector: Detector, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
    """`advance` of a kind that reads several one-per-step values: by `advance_scalars`, where that is certain."""
    if len(sample.values) == 1 and sample.present[0]:
        beside = {name: values.item() for name, values in sample.aux.items()}
        passed, after = detector.advance_scalars(
            state, ({detector.columns[0]: sample.values.item(), **beside},)
        )
        if passed:
            return None, after
    return detector.score(state, sample), detector.learn(state, sample)


def may_breach(detector: Detector, score: FloatArray) -> bool:
    """True if any score can breach: one reduction, NaN ignored; the guard in front of `breaches`."""
    if detector.comparison == "below":
        return bool(float(np.fmin.reduce(score)) < detector.fires_at)
    worst = float(np.fmax.reduce(score))
    return worst >= detector.fires_at if detector.comparison == "at_least" else worst > detector.fires_at
