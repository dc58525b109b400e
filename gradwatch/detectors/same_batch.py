"""The same batch again: a loader that stands still, or a loop that never asks it for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors.detector import (
    STRICT,
    Holds,
    Sample,
    State,
    register_detector,
)
from gradwatch.records.columns import BATCH_HASH
from gradwatch.records.key_limits import Limits

Batches = Annotated[int, Limits(ge=1, le=10_000)]
Differing = Annotated[int, Limits(ge=0, le=10_000)]


class BatchState(NamedTuple):
    """Of K series: `seen[within, K]` the latest hashes (-1 = none yet), `place[K]` the slot the next one takes.

    `differing[K]` hashes were not among those before them, counted up to `differed`.
    """

    seen: NDArray[np.float64]
    place: NDArray[np.int32]
    differing: NDArray[np.int32]


@register_detector
@dataclass(frozen=True, slots=True)
class SameBatch(Holds):
    """The batch of a step is one of the `within` batches before it, byte by byte.

    With `within: 1` (default) it is the one of the step before: three times in a row by default. A larger `within` also
    finds a sampler that draws with replacement from few samples, or an epoch that is shorter than it should be.
    With `differed` it is judged once so many batches have differed: where the whole data set is one batch none has.
    With `one_in` only one batch in so many is hashed, and `within` and `for` count these.

    Score: 1 where the batch was seen within that many, else 0; it breaches at 1. The value is how many batches ago.
    """

    __pydantic_config__: ClassVar[object] = STRICT
    kind: ClassVar[str] = "same_batch"
    default_for: ClassVar[int] = 3

    of: Literal["batch_hash"] = BATCH_HASH
    within: Batches = 1
    differed: Differing = 0
    one_in: Batches = 1

    def init(self, size: int) -> State:
        """No batch seen."""
        return BatchState(
            np.full((self.within, size), -1.0), np.zeros(size, np.int32), np.zeros(size, np.int32)
        )

    def score(self, state: Any, sample: Sample) -> NDArray[np.float64]:
        """float64[K]: 1 or 0; NaN where there is no hash."""
        again = (self.shown(state, sample) > 0) & (state.differing >= self.differed)
        return np.where(_known(sample), again.astype(np.float64), np.nan)

    def shown(self, state: Any, sample: Sample) -> NDArray[np.float64]:
        """float64[K]: how many batches ago it was seen last; 0 = not within `within`."""
        slots = np.arange(self.within)[:, None]
        ago = (state.place - 1 - slots) % self.within + 1
        here = state.seen == sample.values.astype(np.float64)
        nearest = np.where(here, ago, self.within + 1).min(axis=0)
        return np.where(nearest <= self.within, nearest, 0).astype(np.float64)

    def learn(self, state: Any, sample: Sample) -> State:
        """The state with this batch as the latest."""
        known, columns = _known(sample), np.arange(len(sample.values))
        new = known & (self.shown(state, sample) == 0) & (state.seen >= 0).any(axis=0)
        seen = state.seen.copy()
        seen[state.place, columns] = np.where(known, sample.values, seen[state.place, columns])
        return BatchState(
            seen,
            np.where(known, (state.place + 1) % self.within, state.place).astype(np.int32),
            np.minimum(state.differing + new, self.differed).astype(np.int32),
        )


def _known(sample: Sample) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = sample.present & np.isfinite(sample.values)
    return known
