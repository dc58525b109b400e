"""Relative updates ‖Δw‖ / ‖w‖: how far an optimizer moves each parameter at each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.capture.columns.update_ratio import WEIGHT_NORM_FLOOR
from gradwatch.inspect.hooks import UntilRemoved
from gradwatch.runtime import guard
from gradwatch.taps import step_hooks
from gradwatch.taps.optimizers.param_groups import params_of


class UpdateRatios(UntilRemoved):
    """Records ‖Δw‖ / max(‖w‖, 0.1) of every parameter of a model at each N-th step, until the `with` ends.

    `of[name]` lists (step, ratio), `update_ratios` draws them. A copy of the weights is kept during a step that is
    looked at. The floor of 0.1 is that of gradwatch's column `update_ratio`.
    """

    def __init__(self, model: nn.Module, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be positive")
        self.every = every
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.dims = {name: param.dim() for name, param in self._params.items()}
        self._kept: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self._params}
        self._steps: dict[int, int] = {}
        self._before: dict[str, Tensor] = {}
        self._remove = step_hooks.listen(self._keep, self._compare)

    @property
    def of(self) -> dict[str, list[tuple[int, float]]]:
        """(step, ratio) by parameter; waits for a device."""
        return {name: [(step, float(ratio)) for step, ratio in kept] for name, kept in self._kept.items()}

    def remove(self) -> None:
        """Look at no further step; what was found stays. Idempotent."""
        self._remove()

    def _keep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called by taps: keep the weights that this optimizer may move."""
        try:
            step = self._steps.get(id(optimizer), 0)
            self._steps[id(optimizer)] = step + 1
            if step % self.every == 0:
                own = set(map(id, params_of(optimizer)))
                self._before = {
                    name: param.detach().clone() for name, param in self._params.items() if id(param) in own
                }
        except Exception as error:
            guard.fault("inspect", error)

    def _compare(self, optimizer: Optimizer) -> None:
        """Called by taps: compare."""
        try:
            before, self._before = self._before, {}
            with torch.no_grad():
                for name, old in before.items():
                    size = torch.linalg.vector_norm(old).clamp_(min=WEIGHT_NORM_FLOOR)
                    moved = torch.linalg.vector_norm(self._params[name] - old)
                    self._kept[name].append((self._steps[id(optimizer)] - 1, moved / size))
        except Exception as error:
            guard.fault("inspect", error)
