"""The loss scale of a GradScaler that falls and falls: mixed precision has come to its end.

A scaler halves its scale at every step whose gradients overflow (`torch.amp.GradScaler`, `backoff_factor`
0.5) and doubles it after 2,000 steps without one. Single halvings are its way of working; at a scale of 1 or
below gradients overflow by themselves, and training stands still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import STRICT, Holds, Sample, State, register_detector
from gradwatch.detectors.thresholds import Positive
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray

JUMP = 4.0
"""A scale that rises by more than this at once is no growth (that doubles) but a scaler that starts anew."""

Steps = Annotated[int, Limits(ge=1)]
SettlingSteps = Annotated[int, Limits(ge=0)]


class ScaleState(NamedTuple):
    """Of K scalers: `n` samples since it started (int32, counted up to `settle`), `last` scale (0 = none yet).

    `fallen[within, K]`: by how many halvings the scale fell at each of the latest samples; `place[K]` the
    slot that the next sample takes; `largest[K]` scale since it started (0 = none yet).
    """

    n: NDArray[np.int32]
    last: NDArray[np.float32]
    fallen: NDArray[np.float32]
    place: NDArray[np.int32]
    largest: NDArray[np.float32]


@register_detector
@dataclass(frozen=True, slots=True)
class ScaleCollapse(Holds):
    """The GradScaler's scale came down to <= `floor`, or halved >= `halvings` times within as many as `within` steps.

    A healthy run starts at 65,536 and comes down to where its gradients fit, often by more than four halvings
    in a few steps: so those of the first `settle` steps of a scaler are not counted, but `floor` holds from the
    start, for a scale that was once larger: one that begins there (`init_scale=1`) has not collapsed. A scale that
    jumps up (a new scaler, or one whose state was not restored) settles again. For a single rejected step use `above`
    of `scaler_skip`.

    Score: the larger of halvings / `halvings` and `floor` / scale; it breaches at 1. The value is the scale.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "scale_collapse"

    of: Literal["loss_scale"] = "loss_scale"
    floor: Positive = 1.0
    halvings: Steps = 4
    within: Steps = 100
    settle: SettlingSteps = 100

    def init(self, size: int) -> State:
        """No scale seen."""
        return ScaleState(
            np.zeros(size, np.int32),
            np.zeros(size, np.float32),
            np.zeros((self.within, size), np.float32),
            np.zeros(size, np.int32),
            np.zeros(size, np.float32),
        )

    def score(self, state: Any, sample: Sample) -> NDArray[np.float64]:
        """float64[K] as above; NaN where there is no scale, or it is not a finite number >= 0."""
        scale = sample.values.astype(np.float64)
        known = sample.present & np.isfinite(scale) & (scale >= 0)
        fell, anew = self._fall(state, scale, known & (scale > 0))
        columns = np.arange(len(scale))
        # The oldest sample makes room for this one.
        before = state.fallen.sum(axis=0, dtype=np.float64) - state.fallen[state.place, columns]
        recent = np.where(anew, 0.0, before) + fell
        with np.errstate(divide="ignore", invalid="ignore"):
            came_down = (scale < np.maximum(state.largest, state.last)) | (scale > self.floor) | (scale == 0)
            low = np.where(known & came_down & ~(anew & (scale <= self.floor)), self.floor / scale, 0.0)
        return np.where(known, np.maximum(recent / self.halvings, low), np.nan)

    def learn(self, state: Any, sample: Sample) -> State:
        """The state with this scale as the last one."""
        scale = sample.values.astype(np.float64)
        known = sample.present & np.isfinite(scale) & (scale > 0)
        fell, anew = self._fall(state, scale, known)
        columns = np.arange(len(scale))
        fallen = np.where(anew, np.float32(0), state.fallen)
        fallen[state.place, columns] = np.where(known, fell, fallen[state.place, columns])
        n = np.where(anew, 0, state.n)
        return ScaleState(
            np.minimum(n + known, self.settle + 1).astype(np.int32),
            np.where(known, scale, state.last).astype(np.float32),
            fallen,
            np.where(known, (state.place + 1) % self.within, state.place).astype(np.int32),
            np.where(known, np.maximum(scale, np.where(anew, 0, state.largest)), state.largest).astype(
                np.float32
            ),
        )

    def _fall(
        self, state: ScaleState, scale: NDArray[np.float64], known: BoolArray
    ) -> tuple[NDArray[np.float32], BoolArray]:
        """float32[K] halvings since the last sample, as far as they count; bool[K] where a scaler starts anew."""
        last = state.last.astype(np.float64)
        anew: BoolArray = known & (last > 0) & (scale > JUMP * last)
        counted = known & (state.n > self.settle) & (scale < last)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            fell = np.where(counted, np.log2(last / scale), 0.0)
        return fell.astype(np.float32), anew
