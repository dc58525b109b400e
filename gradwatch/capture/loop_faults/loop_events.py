"""Events of a training loop between two steps of one optimizer, as columns of the step that ends them.

A column is absent while there is nothing to report; once there was, it is 0 where there is nothing any more. Those
about clips are 0 at the first clip, too: from then on their rules have data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.capture.loop_faults.alteration_onset import AlteredGradients
from gradwatch.capture.loop_faults.uncleared_gradients import UnclearedGradients
from gradwatch.capture.loop_faults.user_clips import UserClips
from gradwatch.capture.window.arrival_counts import ArrivalCounts
from gradwatch.reading.async_copy import Number
from gradwatch.reading.gradient_writes import State
from gradwatch.records.columns import CLIP_RATIO, CLIPPED_SCALE, DISCARDED, IDLE_CLIPS, UNCLEARED
from gradwatch.taps.clip_functions import Clip

KEPT_UP = frozenset({CLIPPED_SCALE, IDLE_CLIPS, DISCARDED})
"""Columns that are 0 at each step after one that had something to report."""


class LoopEvents:
    """Events between two steps of an optimizer with K parameters: clips, loss scales removed, gradients cleared."""

    def __init__(
        self, params: Sequence[Tensor], arrivals: ArrivalCounts, awaiting: list[UnclearedGradients]
    ) -> None:
        """`awaiting` holds those, of all of a watch, whose next backward is to be compared."""
        self.uncleared = UnclearedGradients(params, arrivals, awaiting)
        self.clips = UserClips()
        self.altered = AlteredGradients()
        self.pending = (
            False  # `at_step` has something to do even where no gradient differs from the last step's
        )
        self._arrivals = arrivals
        self._clip_seen = False
        self._reported: set[str] = set()  # columns that had something to report

    def go_on_from(self, before: LoopEvents) -> None:
        """Go on counting the altered gradients of a capture whose place is taken."""
        self.altered = before.altered

    def clipped(self, clip: Clip, arrived: bool) -> None:
        """Note a clip by the script; `arrived`: a backward has brought gradients since the last step."""
        self.clips.made(clip, arrived)
        self.pending = True

    def cleared(self) -> None:
        """Note that what has arrived since the last step was cleared."""
        self.uncleared.cleared()

    def scale_removed(self, scale: Number) -> None:
        """Note that a loss scale is being divided out of the gradients."""
        if self.clips.used:
            self.clips.scale_removed(scale)

    def discard(self) -> None:
        """Discard the open window's events: it is no step's, or not all of it was seen."""
        self.uncleared.discard()
        self.clips = UserClips()

    def at_step(
        self, now: State, before: State | None, calls: NDArray[np.int32], read: list[int]
    ) -> dict[str, Number]:
        """The columns of a step that is about to be taken, with gradients of the state `now`; `before`: at the last.

        `calls[K]` arrived, `read[K]` are their versions as they were read.
        """
        facts: dict[str, Number] = {}
        versions, uncleared, clips = now[1], self.uncleared, self.clips
        last = None if before is None or versions == before[1] else before[:2]
        if last is not None or uncleared.suspected:
            uncleared.compare(now[:2], last)
        if uncleared.under_way and (number := uncleared.found(calls, read)) is not None:
            facts[UNCLEARED] = number
        if clips.used or clips.idle:
            if not self._clip_seen:
                self._clip_seen = True
                facts[CLIPPED_SCALE] = facts[IDLE_CLIPS] = 0.0
            if clips.ratio is not None:
                facts[CLIP_RATIO] = clips.ratio
            if clips.scale is not None:
                facts[CLIPPED_SCALE] = clips.scale
            if clips.idle and not clips.used:
                facts[IDLE_CLIPS] = float(clips.idle)
            self.clips = UserClips()
        if -1 in versions and self._arrivals.current and max(versions) == -1:
            facts[DISCARDED] = float(np.count_nonzero(self._arrivals.counted()))
        for name in self._reported:
            facts.setdefault(name, 0.0)
        self._reported |= {name for name, value in facts.items() if name in KEPT_UP and value != 0.0}
        self.pending = bool(self._reported) or uncleared.suspected or uncleared.under_way
        return facts
