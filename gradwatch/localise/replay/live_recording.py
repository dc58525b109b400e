"""The next steps recorded as they run, where a replay was refused or found nothing: loss function and all.

From one `optimizer.step()` to the next every operation of this thread is looked at, and every backward. The job
computes what it would have computed; it only takes longer, for as many steps as were asked for, and then the
recording ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.replay.operation_recorder import Recorder
from gradwatch.localise.replay.step_replay import Trace, blame_backward
from gradwatch.localise.replay.tensor_sources import sources
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dynamo import anything_compiled
from gradwatch.taps.graph import around_backward


class Live:
    """Records the steps between `begin` and `end`, `steps` of them; `end` gives what one of them came to.

    `seconds` is what the recorded steps have taken so far.
    """

    def __init__(
        self, models: Sequence[nn.Module], steps: int, failed: Callable[[BaseException], None]
    ) -> None:
        self.left = steps
        self.seconds = 0.0
        self._models = models
        self._failed = failed
        self._recorder: Recorder | None = None  # while a step is being recorded
        self._unwatch: Callable[[], None] | None = None
        self._trace = Trace()
        self._began = 0.0

    def begin(self) -> None:
        """Record the next step, after one has ended. Raises `Refused` where that could disturb the job."""
        if self._recorder is None and self.left > 0:
            try:
                # The hooks of a step run with the modes of the script set aside.
                with dispatch_modes.as_found():
                    refuse()
                    self._enter()
            except BaseException:
                with dispatch_modes.as_found():
                    self._leave()
                raise

    def _enter(self) -> None:
        self._trace = Trace(sources=sources(self._models, _named(self._models)))
        self._recorder = Recorder(self._models, self._failed)
        self._recorder.enter(functions=False)
        self._unwatch = around_backward.listen(self._backward)
        self._began = time.perf_counter()

    def _leave(self) -> None:
        try:
            self._leave_all()
        finally:  # once more: what arrived at the first must not leave anything on
            self._leave_all()

    def _leave_all(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._recorder is not None:
            self._recorder.leave()
            self._recorder = None

    @property
    def under_way(self) -> bool:
        """True if a step is being recorded."""
        return self._recorder is not None

    def end(self) -> Trace | None:
        """End the recording before the next step is taken; None where nothing was being recorded."""
        if self._recorder is None:
            return None
        with dispatch_modes.as_found():
            if self._recorder.beneath:
                # The script has entered a dispatch mode of its own since, and is still in it: ours is beneath.
                self._recorder.sleep()
                return None
            self._leave()
        self.left -= 1
        self.seconds += time.perf_counter() - self._began
        return self._trace

    def record_no_more(self) -> None:
        """Leave it at the steps so far: the cause is known."""
        self.left = 0

    def close(self) -> None:
        """Stop recording."""
        self.left = 0
        self.end()

    def _backward(self, roots: Sequence[Tensor]) -> Callable[[], None] | None:
        return None if self._recorder is None else blame_backward(self._trace, self._recorder, roots)


def refuse() -> None:
    """Raise `Refused` where looking at every operation could disturb the job."""
    if dispatch_modes.dispatching():
        raise Refused("the script has a TorchDispatchMode active")
    if not around_backward.possible():
        raise Refused("this torch version offers no hook at the start of a backward")
    if anything_compiled():
        raise Refused("parts of the job are compiled, and recording them would compile them anew")


def _named(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for model in models:
        found |= dict(model.named_parameters())
        found |= dict(model.named_buffers())
    return found
