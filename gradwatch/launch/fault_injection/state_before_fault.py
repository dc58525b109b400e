"""The state of a training before a fault: copies on the host, put back after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from gradwatch.session.session import Session


class SavedState:
    """Copies, on the host, of the weights and buffers of a session's models and the state of an optimizer."""

    def __init__(self, session: Session, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        buffers = [buffer for model in session.models() for buffer in model.buffers()]
        self._tensors = [(tensor, _copied(tensor)) for tensor in (*params, *buffers)]
        self._state = {
            param: {
                key: (value, _copied(value)) if isinstance(value, Tensor) else (None, value)
                for key, value in optimizer.state.get(param, {}).items()
            }
            for param in params
        }

    def restore(self) -> None:
        """Put everything back where it was."""
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
            for param, entries in self._state.items():
                now = self._optimizer.state.get(param)
                if now is None:
                    continue
                for key, (tensor, copy) in entries.items():
                    if tensor is None:
                        now[key] = copy
                    else:
                        tensor.copy_(copy)
                        now[key] = tensor


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # on a device there may be no room for a second model
