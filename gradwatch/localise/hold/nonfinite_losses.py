"""The loop at each backward of a step whose loss is not finite: its functions, and the values of their names.

A later micro-batch gives those names other values; a function that returns takes them with it. Only looked at where the
loss lies on the host: to read one from a device would wait for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.localise.hold.model_recorder import next_order
from gradwatch.localise.loss.loop_scope import LoopAtBackward, scopes
from gradwatch.taps import backward_entry, step_hooks
from gradwatch.taps.backward_entry import BackwardCall

MOST = 4  # of one step


class NonFiniteLosses:
    """Holds the scopes of such backwards until `drop`; `failed` counts an internal error."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self.found: list[LoopAtBackward] = []
        self._since = self._before = 0  # of the backward before, and of the last one
        self._removes = [
            backward_entry.listen(self._begins),
            step_hooks.listen(after=self._step_taken, only_if=self.found),
        ]

    def close(self) -> None:
        """Look at no further backward, and release everything."""
        for remove in self._removes:
            remove()
        self.drop()

    def drop(self) -> None:
        """Release everything: it belongs to no step."""
        self.found.clear()

    def at_step(self) -> LoopAtBackward:
        """The loop that is about to take a step, after the last backward."""
        return LoopAtBackward(self._since, sys.maxsize, scopes(exact=False))

    def _step_taken(self, optimizer: Optimizer) -> None:
        """A step has been taken."""
        self.drop()

    def _begins(self, call: BackwardCall) -> None:
        """A backward is about to run; one read of a number on the host."""
        try:
            if call.nested or not call.accumulates or len(call.roots) != 1:
                return
            self._since, self._before = self._before, next_order()
            root = call.roots[0]
            on_host = type(root) is Tensor and root.is_cpu and root.numel() == 1
            if on_host and not math.isfinite(root.item()) and len(self.found) < MOST:
                self.found.append(LoopAtBackward(self._since, self._before, scopes(exact=True)))
        except Exception as error:
            self._failed("localise", error)
