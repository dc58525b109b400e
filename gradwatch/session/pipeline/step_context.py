"""A step while it is judged."""

from __future__ import annotations

from typing import NamedTuple

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed.step_seen_by_all_ranks import Shared
from gradwatch.records.snapshot import Snapshot
from gradwatch.session.binding.optimizer_rules import Clock, OptimizerRules
from gradwatch.session.optimizer_context import OptimizerContext


class StepContext(NamedTuple):
    """A step being judged: this rank's window, the same as all ranks see it, and what was found before any decision."""

    ctx: OptimizerContext
    captured: OptimizerCapture  # what was captured when the step was measured
    bound_rules: OptimizerRules  # the rules that were bound then
    window: WindowNorms
    clock: Clock
    shared: Shared
    found: Snapshot

    @property
    def rejected(self) -> bool:
        """True if a GradScaler keeps this step from the optimizer."""
        return bool(self.shared.values.get("scaler_skip"))
