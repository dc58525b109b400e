"""The loop at each backward of a step whose loss is not finite: its functions, and the values of their names.

A later micro-batch gives those names other values; a function that returns takes them with it. Only looked at where the
loss lies on the host: to read one from a device would wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.localise.loss.loop_scope import LoopScope, scopes
from gradwatch.taps import backward_entry, step_hooks
from gradwatch.taps.backward_entry import BackwardCall

MOST = 4  # of one step


class NonFiniteLosses:
    """Holds the scopes of such backwards until `drop`; `failed` counts an internal error."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self.found: list[list[LoopScope]] = []
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

    def _step_taken(self, optimizer: Optimizer) -> None:
        """A step has been taken."""
        self.drop()

    def _begins(self, call: BackwardCall) -> None:
        """A backward is about to run; one read of a number on the host."""
        try:
            if call.nested or not call.accumulates or len(call.roots) != 1:
                return
            root = call.roots[0]
            on_host = type(root) is Tensor and root.is_cpu and root.numel() == 1
            if on_host and not math.isfinite(root.item()) and len(self.found) < MOST:
                self.found.append(scopes(exact=True))
        except Exception as error:
            self._failed("localise", error)
