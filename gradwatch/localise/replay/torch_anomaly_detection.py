"""torch's own anomaly detection for the next steps, for those who ask for exactly that: it stops the training.

`torch.autograd.set_detect_anomaly(True)` with its NaN check raises out of `loss.backward()` at the first node
that returns NaN (not Inf), and warns with the lines of the forward. gradwatch only switches it on and off.
"""

from __future__ import annotations

import time

import torch

from gradwatch.localise.replay.step_replay import Trace


class Raising:
    """Switches the check on for `steps` steps, and then puts back what was set."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.seconds = 0.0
        self._before: tuple[bool, bool] | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Check the next backward, from the end of a step on."""
        if self._before is None and self.left > 0:
            self._before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.set_anomaly_enabled(True, True)
            self._began = time.perf_counter()

    def end(self) -> Trace | None:
        """End the check before the next step: nothing raised, so there is nothing to report."""
        if self._before is not None:
            self.left -= 1
            self.seconds += time.perf_counter() - self._began
            if self.left <= 0:
                torch.set_anomaly_enabled(*self._before)
                self._before = None
        return None

    def record_no_more(self) -> None:
        """Leave it at the steps so far: the cause is known."""
        self.left = 0

    def close(self) -> None:
        """Put back what was set."""
        self.left = 0
        self.end()
