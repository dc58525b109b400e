"""Gradients that were cleared, and whether a step of an optimizer had used them."""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.capture.optimizer import OptimizerCapture


class Discarded:
    """Tells apart cleared gradients that were used: inside a step, or by an optimizer with the same parameters.

    Of optimizers that share parameters (one wraps another, two take turns) only the one that steps most is asked.
    """

    def __init__(self) -> None:
        self._lanes: list[int] = []  # those that `_sharing` is about, by `id`
        self._sharing: dict[
            int, list[int]
        ] = {}  # by index of a lane, the indices of those that share with it
        self._steps: dict[
            int, int
        ] = {}  # by index of a lane, how often those had stepped when it was last asked

    def unused(self, lane: OptimizerCapture, lanes: Sequence[OptimizerCapture]) -> bool:
        """Whether the gradients of a lane, one of `lanes`, were cleared before any step has used them."""
        if lane.settled >= 0:  # a step is under way, whose closure is evaluated once more
            return False
        sharing = self._shared(lane, lanes)
        if not sharing:
            return True
        steps = sum(one.step for one in sharing)
        before, self._steps[lane.index] = self._steps.get(lane.index, 0), steps
        asked = min((lane, *sharing), key=lambda one: (-one.step, one.index))
        return asked is lane and steps == before

    def _shared(self, lane: OptimizerCapture, lanes: Sequence[OptimizerCapture]) -> list[OptimizerCapture]:
        now = list(map(id, lanes))
        if now != self._lanes:
            self._lanes, self._sharing = now, {}
        found = self._sharing.get(lane.index)
        if found is None:
            mine = set(lane.param_ids)
            found = [
                k for k, one in enumerate(lanes) if one is not lane and not mine.isdisjoint(one.param_ids)
            ]
            self._sharing[lane.index] = found
        return [lanes[k] for k in found]
