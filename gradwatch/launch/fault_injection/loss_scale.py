"""The loss scale of the script's GradScaler: kept before a fault, and put back after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.taps import grad_scaler


class LossScale:
    """Listens to the GradScalers of the process; `rejected(optimizer)` is called for each step that one rejects."""

    def __init__(self, rejected: Callable[[Optimizer], None]) -> None:
        self._rejected = rejected
        self._scale: Tensor | None = None
        self._kept: Tensor | None = None
        self._updates_left = 0
        grad_scaler.listen(self)
        grad_scaler.listen_scale(self._scaled)

    def keep(self) -> None:
        """Keep the scale as it is now."""
        self._kept = None if self._scale is None else self._scale.clone()
        self._updates_left = 0

    def put_back(self) -> None:
        """Put the kept scale back as soon as nothing is scaled by the present one.

        The update that follows a rejected step has yet to lower it, and no listener is called after an update: it is
        put back before the next one.
        """
        self._updates_left = 2

    def unscaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Nothing: gradients are no matter here."""

    def rejected(self, optimizer: Optimizer) -> None:
        """A scaler has not called the optimizer."""
        self._rejected(optimizer)

    def abandoned(self, found: Mapping[int, Tensor | None]) -> None:
        """A scaler is about to update its scale: what was scaled by it has been used."""
        if self._updates_left and self._scale is not None and self._kept is not None:
            self._updates_left -= 1
            if not self._updates_left:
                with torch.no_grad():
                    self._scale.copy_(self._kept)

    def _scaled(self, scale: Tensor) -> None:
        self._scale = scale
