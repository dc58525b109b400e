"""States that the script takes of its optimizers, as for a checkpoint, noticed for the sinks.

Nothing is read, judged or waited for at the call: a sink joins the health of the weights to it from the Records. The
call costs microseconds, the first after a step; further ones before the next step are the same state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.optim import Optimizer

from gradwatch.capture.read_after_backward import Capture
from gradwatch.records.saved_optimizer_state import TakenState
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.boundary.optimizer_step import Boundary
from gradwatch.sinks.circuit_breaker import Breaker
from gradwatch.taps.optimizers import state_dict_calls
from gradwatch.taps.optimizers.param_groups import params_of

MOST_OPTIMIZERS = 16
"""As many as a report draws: where each parameter has an optimizer of its own, they step together anyway."""


class TakenStates:
    """Gives the sinks of one session each state that is taken of what it watches, once a step; `close` ends that."""

    def __init__(
        self, capture: Capture, boundary: Boundary, sinks: Sequence[Breaker], activity: Activity
    ) -> None:
        self._capture = capture
        self._boundary = boundary
        self._sinks = sinks
        self._activity = activity
        self._number = 0
        self._steps = (
            0  # taken when a state of an optimizer was last; before the first one a script loads states
        )
        self._own: list[tuple[int, int]] = []
        self._remove = state_dict_calls.listen(self._taken_of)

    def close(self) -> None:
        """Notice no further state."""
        self._remove()

    def _taken_of(self, optimizer: Optimizer) -> None:
        steps = self._boundary.steps
        # Cheap, and true of the second and each further optimizer that is saved after the same step.
        if steps == self._steps or self._activity.idle() or not self._watches(optimizer):
            return
        self._steps = steps
        self.take()

    def take(self) -> None:
        """Note that the state of everything watched was taken now."""
        if self._activity.idle():
            return
        captures = tuple(self._capture.captures)
        own = [(one.index, one.step - 1) for one in captures if one.step and one.params][:MOST_OPTIMIZERS]
        if not own or own == self._own:
            return
        self._own = own
        taken = TakenState(self._number, tuple(own), time.time())
        self._number += 1
        for sink in tuple(self._sinks):
            sink.take_state(taken)

    def _watches(self, optimizer: Optimizer) -> bool:
        """True if it is watched, or holds a parameter that is, as one that wraps a watched one does."""
        known = self._capture.slots.of
        return self._capture.capture_of(optimizer) is not None or any(
            id(param) in known for param in params_of(optimizer)
        )
