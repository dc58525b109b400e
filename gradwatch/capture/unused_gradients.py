"""Gradients of one optimizer that were cleared before any step had used them."""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.taps import step_hooks


class UnusedGradients:
    """Tells whether gradients were cleared unused: inside no step, and by no optimizer with the same parameters.

    Of optimizers that share parameters (one wraps another, two take turns) only the one that steps most
    can have left gradients unused.
    """

    def __init__(self) -> None:
        self._captures: list[int] = []  # those that `_sharing` is about, by `id`
        self._sharing: list[int] = []  # the indices of those that have some of the same parameters
        self._steps = 0  # how often those had stepped when gradients were last cleared

    def unused(self, captured: OptimizerCapture, captures: Sequence[OptimizerCapture]) -> bool:
        """True if the gradients of a capture, one of `captures`, were cleared before any step has used them."""
        if captured.closed_at >= 0:  # a step is under way, whose closure is evaluated once more
            return False
        sharing = self._shared(captured, captures)
        if not sharing:
            return True
        steps = sum(one.step for one in sharing)
        before, self._steps = self._steps, steps
        optimizers = (one.optimizer() for one in sharing if one.optimizer is not None)
        if any(one is not None and step_hooks.steps_under_way(one) for one in optimizers):
            return False  # it is a closure of that one
        asked = min((captured, *sharing), key=lambda one: (-one.step, one.index))
        return asked is captured and steps == before

    def _shared(
        self, captured: OptimizerCapture, captures: Sequence[OptimizerCapture]
    ) -> list[OptimizerCapture]:
        now = list(map(id, captures))
        if now != self._captures:
            mine = set(captured.param_ids)
            self._captures = now
            self._sharing = [
                k
                for k, one in enumerate(captures)
                if one is not captured and not mine.isdisjoint(one.param_ids)
            ]
        return [captures[k] for k in self._sharing]
