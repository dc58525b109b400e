"""What the step boundary asks of the composition root."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from gradwatch.capture.optimizer import Lane
from gradwatch.capture.window import Window
from gradwatch.records.snapshot import Decision
from gradwatch.session.deferred import Measured


class Judge(Protocol):
    """Who owns an optimizer, what is to become of its gradients, and who is told of it; the boundary only asks."""

    def resting(self) -> bool:
        """Whether nothing is watched now: closed, another process, or a pause after faults of ours."""

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is watched now."""

    def bound(self, lane: Lane) -> None:
        """A lane was made or its parameters changed."""

    def needs_host(self, lane: Lane) -> bool:
        """Whether a rule may act on this very step, so that the numbers must be waited for."""

    def pooled(self, lane: Lane) -> bool:
        """Whether the ranks put together what each knows of these gradients."""

    def skips_nonfinite(self, lane: Lane) -> bool:
        """Whether a rule skips non-finite steps (then a fused optimizer is told on the device)."""

    def arrive(self, lane: Lane | None) -> None:
        """A step boundary begins, at which other ranks may wait for this one; None where there is no lane yet."""

    def enter(self, lane: Lane) -> None:
        """The lane that stands at this boundary; its ranks meet at the first.

        Where neither they nor anything else wait for its boundaries it is `solitary` from then on, and what comes here
        and in `arrive` and `depart` is not asked again.
        """

    def depart(self, lane: Lane | None) -> None:
        """The boundary has been left, by a fault of ours or not: see to it that nobody waits any longer."""

    def max_norm(self, lane: Lane) -> float | None:
        """The standing clip of the total norm, which a device applies without the host; None = none."""

    def clips_again(self, lane: Lane, norms: NDArray[np.float64]) -> Decision:
        """What the standing clips ask of one more gradient of a step that has been judged, of these `norms[K]`."""

    def captured(self) -> None:
        """A step was captured in a CUDA graph: nobody will see its replays."""

    def measure(self, lane: Lane, window: Window) -> Measured:
        """Note everything about a window that must be read now; the result judges it, now or some steps later.

        Where a rule may have something to say at once, `window.calm` is taken away.
        """

    def acted(self, lane: Lane, decision: Decision, error: Exception | None) -> None:
        """What was really done at this boundary, and the fault that kept it from being as decided."""

    def forget(self, lane: Lane) -> None:
        """What was heard since the last Snapshot of a lane belongs to no step."""

    def failed(self, component: str, error: BaseException) -> None:
        """Count a fault of ours."""
