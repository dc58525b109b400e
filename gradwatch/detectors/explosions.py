"""Explosions of the total norm that need no usual level: a rail at the scale of the loss, and the largest norm so far.

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
    Sample,
    Scope,
    State,
    advance_one,
    register_detector,
)
from gradwatch.detectors.thresholds import OverThreshold, Positive
from gradwatch.records.columns import CONFIRMED_JUMP, CONFIRMED_NORM
from gradwatch.records.snapshot import BoolArray, FloatArray

LOSS = "loss"
LEAST, MOST = 1.0, 10.0
"""Scale of a loss: one that is ten times too large, or more, may itself be what is wrong (weights, a loss scale)."""


class ScaleState(NamedTuple):
    """Of K series: the smallest scale of the `loss` so far, 1 to 10; 0 while none is known."""

    loss: NDArray[np.float64]


@register_detector
@dataclass(frozen=True, slots=True)
class Exploded(OverThreshold):
    """total_norm > threshold x the smallest |loss| so far, 1 at least and 10 at most: a rail at the scale of the loss.

    A norm is as many times larger as its loss is, where that is a sum over the batch or its targets are large. A loss
    that explodes with the norm is not the smallest; one that is far too large from the start counts as 10. Without a
    loss the threshold is as it is. The score is the norm over that scale.
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
        return ScaleState(np.zeros(size))

    def score(self, state: State, sample: Sample) -> NDArray[np.float64]:
        """The norm over the scale of the loss; +inf where it is NaN; NaN where there was no sample."""
        norm = np.where(np.isnan(sample.values), np.inf, sample.values.astype(np.float64))
        scale = np.maximum(self.learn(state, sample).loss, LEAST)
        return np.where(sample.present, norm / scale, np.nan)

    def learn(self, state: State, sample: Sample) -> ScaleState:
        """The smallest loss, with this one where it came with a norm."""
        before, loss = cast(ScaleState, state).loss, sample.aux[LOSS].astype(np.float64)
        known = sample.present & np.isfinite(sample.values) & np.isfinite(loss)
        scale = np.clip(np.abs(loss), LEAST, MOST)
        return ScaleState(np.where(known & ((before == 0) | (scale < before)), scale, before))

    def advance(self, state: State, sample: Sample) -> tuple[FloatArray | None, State]:
        """As `score` and `learn`; almost every step in plain floats: None = it does not breach."""
        return advance_one(self, state, sample)

    def advance_scalars(self, state: State, steps: Sequence[Mapping[str, float]]) -> tuple[int, State]:
        """As `advance` of each, in plain floats, up to one that may breach."""
        before = cast(ScaleState, state)
        if len(before.loss) != 1:
            return 0, state
        least, below = before.loss.item(), 0
        for values in steps:
            loss, smallest = abs(values.get(LOSS, math.nan)), least
            if loss < math.inf and (least == 0 or loss < least):
                smallest = min(max(loss, LEAST), MOST)
            if not values.get(self.of, math.nan) / max(smallest, LEAST) <= self.threshold:
                break
            least, below = smallest, below + 1
        return below, before if least == before.loss.item() else ScaleState(np.array([least]))

    def rebaseline(self, state: State, mask: BoolArray, keep_judging: bool) -> ScaleState:
        """Learn the scale anew; across a change that keeps judging it stays."""
        before = cast(ScaleState, state)
        return before if keep_judging else ScaleState(np.where(mask, 0.0, before.loss))


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


def _known(sample: Sample, value: NDArray[np.float64]) -> BoolArray:
    known: BoolArray = sample.present & np.isfinite(value) & (value > 0)
    return known
