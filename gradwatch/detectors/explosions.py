"""Explosions that need no usual level: of the total norm, at the scale of the loss or beyond the largest norm so far;
of the loss, in the first steps.

The detectors that know a usual level need a warm-up, and a training can be ruined before it is over. The largest value
so far needs none: healthy runs were seen to jump by a factor of 1,100 (REINFORCE), none by 10,000. A loss that is
summed over the batch has large gradients, so a rail is at the scale of the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import (
    STRICT,
    Comparison,
    Detector,
    Exceeding,
    Sample,
    Scope,
    State,
    advance_one,
    register_detector,
)
from gradwatch.detectors.recent_extremes import Window
from gradwatch.detectors.thresholds import OverThreshold, Positive
from gradwatch.records.columns import CONFIRMED_JUMP, CONFIRMED_NORM
from gradwatch.records.snapshot import BoolArray, FloatArray

LOSS = "loss"
LEAST, MOST = 1.0, 10.0
"""Scale of a loss: one that is ten times too large, or more, may itself be what is wrong (weights, a loss scale)."""
LEARNED = 0.5
"""Of the first loss: one that fell that far is what the training is about (large targets, a sum), however large."""


class ScaleState(NamedTuple):
    """Of K series: the smallest |loss| so far, 1 at least, as `loss`, and the `first` one; 0 while none is known."""

    loss: NDArray[np.float64]
    first: NDArray[np.float64]


@register_detector
@dataclass(frozen=True, slots=True)
class Exploded(OverThreshold):
    """total_norm > threshold x the smallest |loss| so far: a rail at the scale of the loss.

    A norm is as many times larger as its loss is, where that is a sum over the batch or its targets are large. The
    smallest counts as 1 at least; as 10 at most, since one that is far too large from the start may be what is wrong,
    until it has fallen to half of the first. A loss that explodes with the norm is not the smallest. Without a loss the
    threshold is as it is. The score is the norm over that scale.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "exploded"
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["total_norm"] = "total_norm"
    threshold: Positive = 1e3
    clear_below: Positive | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The total norm, and the loss where it is known."""
        return (self.of, LOSS)

    def baseline_key(self) -> tuple[Any, ...]:
        """Key of the scale, which does not depend on the threshold."""
        return (self.kind,)

    def in_words(self, score: float) -> str:
        """The norm at the scale of the loss; NaN, which scores infinity, is on neither side of the threshold."""
        if score == math.inf:
            return "not finite"
        return f"{score:.4g} at the scale of the loss, above {self.threshold:.4g}"

    def init(self, size: int) -> ScaleState:
        """No loss seen."""
        return ScaleState(np.zeros(size), np.zeros(size))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The norm over the scale of the loss; +inf where it is NaN; NaN where there was no sample."""
        norm = np.where(np.isnan(sample.values), np.inf, sample.values.astype(np.float64))
        after = self.learn(state, sample)
        scale = np.array(
            [_scale(*pair) for pair in zip(after.loss.tolist(), after.first.tolist(), strict=True)]
        )
        return np.where(sample.present, norm / scale, np.nan)

    def learn(self, state: State, sample: Sample) -> ScaleState:
        """The smallest loss, with this one where it came with a norm; the first that did."""
        before, first = cast(ScaleState, state)
        loss = np.abs(sample.aux[LOSS].astype(np.float64))
        known = sample.present & np.isfinite(sample.values) & np.isfinite(loss)
        smaller = known & ((before == 0) | (loss < before))
        return ScaleState(
            np.where(smaller, np.maximum(loss, LEAST), before),
            np.where(known & (before == 0), loss, first),
        )

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; almost every step in plain floats: None = it does not breach."""
        return advance_one(self, state, sample)

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """As `advance` of each, in plain floats, up to one that may breach."""
        before = cast(ScaleState, state)
        if len(before.loss) != 1:
            return 0, state
        least, first, below = before.loss.item(), before.first.item(), 0
        for values in steps:
            loss, smallest, begun = abs(values.get(LOSS, math.nan)), least, first
            if loss < math.inf and (least == 0 or loss < least):
                smallest, begun = max(loss, LEAST), first if least else loss
            # `_scale`, without the call: of almost every step.
            scale = smallest if smallest <= LEARNED * begun else min(smallest, MOST)
            if not values.get(self.of, math.nan) / max(scale, LEAST) <= self.threshold:
                break
            least, first, below = smallest, begun, below + 1
        if least == before.loss.item():
            return below, before
        return below, ScaleState(np.array([least]), np.array([first]))

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> ScaleState:
        """Learn the scale anew; across a change that keeps judging it stays."""
        before = cast(ScaleState, state)
        if keep_judging:
            return before
        return ScaleState(np.where(mask, 0.0, before.loss), np.where(mask, 0.0, before.first))


def _scale(least: float, first: float) -> float:
    """The scale of a series whose smallest and first |loss| these are: 1 where none is known."""
    return max(least if least <= LEARNED * first else min(least, MOST), LEAST)


KNOWN_AT_LEAST = 2
"""Samples that must be known before one is judged: the first may be anything, the second may be its like."""


class JumpState(NamedTuple):
    """Of K series: `n` samples learned (int32, counted up to 2), the `largest` of them, the largest |`loss`| beside."""

    n: NDArray[np.int32]
    largest: NDArray[np.float64]
    loss: NDArray[np.float64]


@register_detector
@dataclass(frozen=True, slots=True)
class Jump(Detector):
    """total_norm >= above x the largest so far; or >= confirmed x, where the loss jumped as far or weights are ruined.

    Score: the factor over the largest value so far; one that the loss does not confirm counts as less than
    `confirmed` unless it reaches `above`. The third positive, finite sample is the first to be judged. A sample that
    breaches raises the largest value by a factor of `confirmed` at most, so that one broken step does not blind the
    rest of the run. Without a loss and a look at the weights only `above` counts. Blind to slow growth (use `drift`)
    and to NaN (`nonfinite`).

    Whether a step that jumped 100 times or more has ruined the weights is known only after it. The step at which they
    are looked at (the next; on a device some steps later) then breaches, with the factor and the norm of the earlier
    one as its score and value. Not so for a rule that acts: each rank sees its own weights, and the step to act on is
    over.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "jump"
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["total_norm"] = "total_norm"
    above: Positive = 1e4
    confirmed: Positive = 100.0

    def __post_init__(self) -> None:
        if not 1 < self.confirmed <= self.above:
            raise ValueError("confirmed must be above 1 and not exceed above")

    @property
    def columns(self) -> tuple[str, ...]:
        """The total norm; the loss and what the weights have confirmed of an earlier step, where these are known."""
        return (self.of, "loss", CONFIRMED_JUMP, CONFIRMED_NORM)

    @property
    def comparison(self) -> Comparison:
        """The bound itself breaches."""
        return "at_least"

    @property
    def fires_at(self) -> float:
        """`confirmed`: a factor that reaches only `above` is more than that."""
        return self.confirmed

    def init(self, size: int) -> JumpState:
        """No sample seen."""
        return JumpState(np.zeros(size, np.int32), np.zeros(size), np.zeros(size))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """float64[K] as above; NaN for the first two samples, and one that is missing, not finite or not positive."""
        jump, value = cast(JumpState, state), sample.values.astype(np.float64)
        judged = _known(sample, value) & (jump.n >= KNOWN_AT_LEAST)
        loss = np.abs(sample.aux["loss"].astype(np.float64))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factor = value / jump.largest
            # A NaN stands for a loss that is not known; `loss_nonfinite` is about one that is NaN.
            agrees = (jump.loss > 0) & (loss >= self.confirmed * jump.loss)
        least = math.nextafter(self.confirmed, 0.0)
        counted = (factor >= self.above) | agrees
        now = np.where(counted, factor, np.minimum(factor, least))
        return np.where(judged, np.fmax(now, sample.aux[CONFIRMED_JUMP]), np.nan)

    def shown(self, state: State, sample: Sample) -> FloatArray:
        """[K]: the total norm, the earlier one where the score is that of an earlier step."""
        earlier = self.score(state, sample) == sample.aux[CONFIRMED_JUMP]
        return np.where(earlier, sample.aux[CONFIRMED_NORM], sample.values)

    def learn(self, state: State, sample: Sample) -> JumpState:
        """The largest values after it; missing, non-finite and non-positive samples change nothing."""
        jump, value = cast(JumpState, state), sample.values.astype(np.float64)
        known = _known(sample, value)
        bounded = known & (self.score(state, sample) >= self.confirmed)
        loss = np.abs(sample.aux["loss"].astype(np.float64))
        with np.errstate(invalid="ignore", over="ignore"):
            value = np.where(bounded, np.minimum(value, jump.largest * self.confirmed), value)
            loss = np.where(bounded, np.minimum(loss, jump.loss * self.confirmed), loss)
            is_known = known & np.isfinite(loss)
            return JumpState(
                np.minimum(jump.n + known, KNOWN_AT_LEAST).astype(np.int32),
                np.where(known, np.maximum(jump.largest, value), jump.largest),
                np.where(is_known, np.maximum(jump.loss, loss), jump.loss),
            )

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """Almost every step, a single series in plain floats: None = it does not reach `confirmed`."""
        jump = cast(JumpState, state)
        if len(sample.values) > 1 or jump.n[0] < KNOWN_AT_LEAST or not sample.present[0]:
            return Detector.advance(self, state, sample)
        value, largest, loss = float(sample.values[0]), float(jump.largest[0]), float(sample.aux["loss"][0])
        late = not math.isnan(sample.aux[CONFIRMED_JUMP][0])
        if late or not 0 < value < self.confirmed * largest < math.inf:
            return Detector.advance(self, state, sample)
        is_known = abs(loss) if math.isfinite(loss) else 0.0
        return None, JumpState(
            jump.n,
            jump.largest if value <= largest else np.array([value]),
            jump.loss if is_known <= jump.loss[0] else np.array([is_known]),
        )

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """Count those where neither total norm nor loss is the largest yet, and nothing earlier is confirmed."""
        jump, count = cast(JumpState, state), 0
        if len(jump.n) == 1 and jump.n[0] >= KNOWN_AT_LEAST:
            largest, largest_loss = jump.largest.item(), jump.loss.item()
            for values in steps:
                total, loss = values.get(self.of, math.nan), values.get("loss", 0.0)
                if not (0 < total <= largest and abs(loss) <= largest_loss) or CONFIRMED_JUMP in values:
                    break
                count += 1
        return count, state

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> JumpState:
        """Start over; what was the largest stays so across a change that keeps judging."""
        n, largest, loss = cast(JumpState, state)
        if keep_judging:
            return JumpState(n, largest, loss)
        return JumpState(
            np.where(mask, 0, n).astype(np.int32), np.where(mask, 0.0, largest), np.where(mask, 0.0, loss)
        )


class DivergedState(NamedTuple):
    """Of K series: `n` samples learned (int32, up to `within`), the `first` one, whether the last was `over`."""

    n: NDArray[np.int32]
    first: NDArray[np.float64]
    over: BoolArray


@register_detector
@dataclass(frozen=True, slots=True)
class Diverged(Exceeding):
    """loss > above x the first loss, in the first steps: a learning rate that is too large from the start.

    Kinds that know a usual level are still warming up then, and a clip or a normalisation keeps the norms of such a
    training small. The score is the loss over the first one, of the samples up to `within`; beyond them it is judged
    on only until it is lower again. Nothing is judged where the first loss is not positive (an objective, a likelihood
    of densities). Samples that are not finite are none.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "diverged"
    finishes: ClassVar[bool] = True
    scopes: ClassVar[tuple[Scope, ...]] = ("total",)

    of: Literal["loss"] = "loss"
    above: Positive = 10.0
    clear_below: Positive | None = None
    within: Window = 60

    def __post_init__(self) -> None:
        Exceeding.__post_init__(self)
        if not self.above > 1:
            raise ValueError("above is a factor over the first loss: it must be greater than 1")

    def in_words(self, score: float) -> str:
        """The factor over the first loss."""
        return f"{score:.4g} times the first one"

    def init(self, size: int) -> DivergedState:
        """No sample seen."""
        return DivergedState(np.zeros(size, np.int32), np.zeros(size), np.zeros(size, np.bool_))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The loss over the first one; NaN for the first itself, beyond `within`, and without a finite sample."""
        first = cast(DivergedState, state).first
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            factor = sample.values.astype(np.float64) / first
        return np.where(self._judged(state, sample), factor, np.nan)

    def learn(self, state: State, sample: Sample) -> DivergedState:
        """Count the sample, and keep the first."""
        n, first, over = cast(DivergedState, state)
        value = sample.values.astype(np.float64)
        known = sample.present & np.isfinite(value)
        with np.errstate(over="ignore"):
            is_over = self._judged(state, sample) & (value > self.above * first)
        return DivergedState(
            np.minimum(n + known, self.within).astype(np.int32),
            np.where(known & (n == 0), value, first),
            np.where(known, is_over, over),
        )

    def _judged(self, state: State, sample: Sample) -> BoolArray:
        n, first, over = cast(DivergedState, state)
        known: BoolArray = sample.present & np.isfinite(sample.values)
        return known & (first > 0) & ((n < self.within) | over)

    def done(self, state: State) -> bool:
        """True beyond `within`, unless it is still judged."""
        n, _, over = cast(DivergedState, state)
        return bool((n >= self.within).all() and not over.any())

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """All steps beyond `within`; before, those not above the bound, in plain floats."""
        if self.done(state):
            return len(steps), state
        count, first, over = (field.item() for field in cast(DivergedState, state))
        if over:
            return 0, state
        passed = 0
        for values in steps:
            value = values.get(self.of, math.nan)
            if math.isfinite(value) and count < self.within:
                if first > 0 and value > self.above * first:
                    break
                first, count = first if count else value, count + 1
            passed += 1
        return passed, DivergedState(np.array([count], np.int32), np.array([first]), np.zeros(1, np.bool_))

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> DivergedState:
        """The next sample is the first one again; not across a change that keeps judging."""
        n, first, over = cast(DivergedState, state)
        if keep_judging:
            return DivergedState(n, first, over)
        return DivergedState(np.where(mask, 0, n).astype(np.int32), np.where(mask, 0.0, first), over & ~mask)


def _known(sample: Sample, value: NDArray[np.float64]) -> BoolArray:
    known: BoolArray = sample.present & np.isfinite(value) & (value > 0)
    return known
