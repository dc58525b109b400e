"""`found_inf` and `grad_scale` of a fused optimizer, set for one step: it skips, or divides, without a host sync."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.taps.grad_scaler import supports_scaling


class AmpOverride(NamedTuple):
    """AMP attribute set on a fused optimizer for one step: `value` in place of `before` (None = nothing)."""

    optimizer: Optimizer
    name: str
    value: Tensor
    before: Any

    def restore(self) -> None:
        """Put it back, not deleted where a GradScaler will do that; not if the script has replaced it."""
        if getattr(self.optimizer, self.name, None) is not self.value:
            return
        if self.before is None:
            delattr(self.optimizer, self.name)
        else:
            setattr(self.optimizer, self.name, self.before)


class AmpOverrides:
    """Attributes set for the step under way."""

    __slots__ = ("_set",)

    def __init__(self) -> None:
        self._set: list[AmpOverride] = []

    def skip_if(self, optimizer: Optimizer, nonfinite: Tensor) -> None:
        """Tell a fused optimizer to skip where this float32 on its device is 1, or where it was told so already."""
        before = getattr(optimizer, "found_inf", None)
        if before is not None:
            nonfinite = torch.maximum(before, nonfinite.to(before.device, non_blocking=True))
        self._override(optimizer, "found_inf", nonfinite)

    def divide(self, optimizer: Optimizer, divisor: Tensor) -> None:
        """Have a fused optimizer divide its gradients by a 0-dim factor without a further pass over them."""
        before = getattr(optimizer, "grad_scale", None)
        if isinstance(before, Tensor):
            divisor = before * divisor.to(before.device, non_blocking=True)
        self._override(optimizer, "grad_scale", divisor)

    def _override(self, optimizer: Optimizer, name: str, value: Tensor) -> None:
        self._set.append(AmpOverride(optimizer, name, value, getattr(optimizer, name, None)))
        setattr(optimizer, name, value)

    def restore(self) -> None:
        """Restore both as they were; not where other code has set them since."""
        overrides, self._set = self._set, []
        for override in overrides:
            override.restore()


def divides(optimizer: Optimizer, captured: OptimizerCapture) -> bool:
    """True if the optimizer divides its gradients by `grad_scale` itself, as torch's fused ones do.

    Not asked of sharded parameters, whose kernels want the divisor on a mesh.
    """
    return supports_scaling(optimizer) and not captured.distributed
