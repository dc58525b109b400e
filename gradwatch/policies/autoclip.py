"""Clipping at a percentile of the norms so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradwatch.policies.norm import clip_coefficients
from gradwatch.policies.policy import Coefficients, Count, Floats, Policy, State, register_policy, usable
from gradwatch.records.key_limits import Limits
from gradwatch.records.snapshot import BoolArray

SMALLEST = 16  # rows; doubled until there are `history` of them
MOST_REMEMBERED = 1 << 24
"""Norms that one `autoclip` may remember: 64 MiB."""


class AutoClipState(NamedTuple):
    """`ring[R, K]` the last norms, R growing to `history`; `seen[K]` how many came, of which R are kept."""

    ring: NDArray[np.float32]
    seen: NDArray[np.int64]


@register_policy
@dataclass(frozen=True, slots=True)
class AutoClip(Policy):
    """Clip to the `percentile` of the norms so far, the current one included (Seetharaman et al. 2020).

    By its nature it clips most steps of a healthy run (90 % of them at the default); use `baseline` to leave
    healthy steps alone. The reference is https://github.com/pseeth/autoclip (`autoclip.py`), percentile 10 being
    its authors' choice; `history` bounds the memory, which is unbounded there, to the latest norms (ours: 10,000).
    """

    method: ClassVar[str] = "autoclip"

    percentile: Annotated[float, Limits(gt=0, le=100)] = 10.0
    history: Count = 10_000

    def misfit(self, covered: int, series: int) -> tuple[str, str] | None:
        """Refusal where it would keep more than `MOST_REMEMBERED` norms."""
        if not covered or series * self.history <= MOST_REMEMBERED:
            return None
        advice = f"at most history: {max(1, MOST_REMEMBERED // series)} for so many, or another scope"
        return f"autoclip would keep {self.history} norms of {series} series", advice

    def state_key(self) -> tuple[Any, ...]:
        """The same norms serve any percentile."""
        return (self.method, self.history)

    def init(self, count: int) -> AutoClipState:
        """No norm seen."""
        return AutoClipState(np.zeros((0, count), np.float32), np.zeros(count, np.int64))

    def coefficients(self, state: State, norms: Floats, present: BoolArray) -> Coefficients:
        """Against the percentile of the history with this step in it."""
        return clip_coefficients(norms, self.threshold(self.learn(state, norms, present)), present)

    def threshold(self, state: AutoClipState) -> Floats:
        """float64[K]: the percentile, interpolated linearly as `numpy.percentile` does; inf without a norm."""
        rows, count = state.ring.shape
        filled = np.minimum(state.seen, self.history)
        if not rows:
            return np.full(count, np.inf)
        unset = np.arange(rows)[:, None] >= filled
        ordered = np.sort(np.where(unset, np.float32(np.inf), state.ring), axis=0).astype(np.float64)
        place = np.maximum(filled - 1, 0) * (self.percentile / 100.0)
        low = np.floor(place).astype(np.intp)
        high = np.minimum(low + 1, np.maximum(filled - 1, 0))
        series = np.arange(count)
        below, above = ordered[low, series], ordered[high, series]
        with np.errstate(invalid="ignore"):  # inf - inf of a series without a norm
            between = below + (above - below) * (place - low)
        return np.where(filled > 0, between, np.inf)

    def learn(self, state: State, norms: Floats, present: BoolArray) -> AutoClipState:
        """Put the norms into the ring, over the oldest where it is full."""
        before = cast(AutoClipState, state)
        columns = np.flatnonzero(usable(norms, present))
        if not len(columns):
            return before
        slots = before.seen[columns] % self.history
        ring = self._with_room(before.ring, int(slots.max()) + 1)
        ring[slots, columns] = norms[columns]
        seen = before.seen.copy()
        seen[columns] += 1
        return AutoClipState(ring, seen)

    def _with_room(self, ring: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
        """A copy of the ring that has at least so many rows."""
        if rows <= len(ring):
            return ring.copy()
        larger = np.zeros((min(self.history, max(SMALLEST, 2 * len(ring), rows)), ring.shape[1]), np.float32)
        larger[: len(ring)] = ring
        return larger
