"""Gradients that were cleared, and whether a step of an optimizer had used them."""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.capture.optimizer import OptimizerCapture


class Discarded:
    """Tells apart cleared gradients that were used: inside a step, or by an optimizer with the same parameters.

    Of optimizers that share parameters (one wraps another, two take turns) only the one that steps most is asked.
    """

    def __init__(self) -> None:
        self._captures: list[int] = []  # those that `_sharing` is about, by `id`
        # By index of a capture, the indices of those that share with it.
        self._sharing: dict[int, list[int]] = {}
        # By index of a capture, how often those had stepped when it was last asked.
        self._steps: dict[int, int] = {}

    def unused(self, captured: OptimizerCapture, captures: Sequence[OptimizerCapture]) -> bool:
        """Whether the gradients of a capture, one of `captures`, were cleared before any step has used them."""
        if captured.closed_at >= 0:  # a step is under way, whose closure is evaluated once more
            return False
        sharing = self._shared(captured, captures)
        if not sharing:
            return True
        steps = sum(one.step for one in sharing)
        before, self._steps[captured.index] = self._steps.get(captured.index, 0), steps
        asked = min((captured, *sharing), key=lambda one: (-one.step, one.index))
        return asked is captured and steps == before

    def _shared(
        self, captured: OptimizerCapture, captures: Sequence[OptimizerCapture]
    ) -> list[OptimizerCapture]:
        now = list(map(id, captures))
        if now != self._captures:
            self._captures, self._sharing = now, {}
        found = self._sharing.get(captured.index)
        if found is None:
            mine = set(captured.param_ids)
            found = [
                k
                for k, one in enumerate(captures)
                if one is not captured and not mine.isdisjoint(one.param_ids)
            ]
            self._sharing[captured.index] = found
        return [captures[k] for k in found]
