"""The loop at each backward of a step whose loss is not finite: its functions, and the values of their names.

A later micro-batch gives those names other values; a function that returns takes them with it. Only where the loss lies
on the host, and is read there for its column: to read one from a device would wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch.optim import Optimizer

from gradwatch.localise.held_calls.model_recorder import next_order
from gradwatch.localise.loss.loop_scope import LoopAtBackward, scopes
from gradwatch.taps import step_hooks

MOST = 4  # of one step


class NonFiniteLosses:
    """Holds the scopes of such backwards until `drop`; `failed` counts an internal error."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self.found: list[LoopAtBackward] = []
        self._remove = step_hooks.listen(after=self._step_taken, only_if=self.found)

    def close(self) -> None:
        """Release every loss that is held."""
        self._remove()
        self.drop()

    def drop(self) -> None:
        """Release everything: it belongs to no step."""
        self.found.clear()

    def add(self) -> None:
        """Hold the loop as it is, before a backward whose loss is not finite."""
        try:
            if len(self.found) < MOST:
                self.found.append(LoopAtBackward(next_order(), scopes(exact=True)))
        except Exception as error:
            self._failed("localise", error)

    def at_step(self) -> LoopAtBackward:
        """The loop that is about to take a step, after the last backward."""
        return LoopAtBackward(sys.maxsize, scopes(exact=False))

    def _step_taken(self, optimizer: Optimizer) -> None:
        """Release what is held, after a step."""
        self.drop()
