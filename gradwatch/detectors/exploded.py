"""A rail for the total norm at the scale of the job: a loss that is summed over the batch has large gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import (
    STRICT,
    Detector,
    Sample,
    State,
    advance_one,
    register_detector,
)
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.dataclass import dataclass
from gradwatch.records.snapshot import BoolArray, FloatArray

LOSS = "loss"
LEAST, MOST = 1.0, 10.0
"""Scale of a loss: one that is ten times too large, or more, may itself be what is wrong (weights, a loss scale)."""


class ScaleState(NamedTuple):
    """Of K series: the smallest scale of the `loss` so far, 1 to 10; 0 while none is known."""

    loss: NDArray[np.float64]


@register_detector
@dataclass(frozen=True, slots=True)
class Exploded(Detector):
    """total_norm > threshold x the smallest |loss| so far, 1 at least and 10 at most: a rail at the scale of the loss.

    A norm is as many times larger as its loss is, where that is a sum over the batch or its targets are large. A loss
    that explodes with the norm is not the smallest; one that is far too large from the start counts as 10. Without a
    loss the threshold is as it is. The score is the norm over that scale.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ClassVar[str] = "exploded"
    scopes: ClassVar = ("total",)

    of: Literal["total_norm"] = "total_norm"
    threshold: Positive = 1e3
    clear_below: Positive | None = None

    def __post_init__(self) -> None:
        if self.clear_below is not None and self.clear_below > self.threshold:
            raise ValueError("clear_below must not exceed threshold")

    @property
    def columns(self) -> tuple[str, ...]:
        """The total norm, and the loss where it is known."""
        return (self.of, LOSS)

    @property
    def fires_at(self) -> float:
        """`threshold`."""
        return self.threshold

    @property
    def clears_at(self) -> float:
        """`clear_below`, or the threshold."""
        return self.threshold if self.clear_below is None else self.clear_below

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
