"""The path of an accelerator on CPU tensors: what is asked of a device, and what is sent from there to the host."""

from __future__ import annotations

import pytest
import torch

from gradwatch.capture.columns import loss as losses
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.reading import async_copy
from gradwatch.session.boundary import optimizer_step


class _Elsewhere(type):
    """Type of a class that every tensor is an instance of, and none directly."""

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.Tensor)


def losses_on_device(patch: pytest.MonkeyPatch) -> None:
    """No loss is a plain tensor whose number is at hand."""
    patch.setattr(losses, "on_host", lambda tensor: False)
    patch.setattr(losses, "Tensor", _Elsewhere("Tensor", (), {}))


def gradients_on_device(patch: pytest.MonkeyPatch) -> None:
    """Gradients of every optimizer, and the loss that is sent together with their norms, count as on a device."""
    patch.setattr(
        OptimizerCapture,
        "on_cpu",
        property(lambda captured: False, lambda captured, value: None),
        raising=False,
    )
    losses_on_device(patch)
    for module in (async_copy, optimizer_step):
        patch.setattr(module, "on_host", lambda tensor: False)
