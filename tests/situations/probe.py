"""The independent computation: what every step should report, from the gradients themselves, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MAX_NORM = 0.05  # the loops clip to this, so that "before clipping" and "after" are different numbers


@dataclass
class Expected:
    """What one `optimizer.step()` should be reported as: norms by name of the parameters that got a gradient."""

    norm: dict[str, float]
    norm_applied: dict[str, float]
    norm_local: dict[str, float]

    @property
    def total_norm(self) -> float:
        return math.sqrt(sum(norm * norm for norm in self.norm.values()))


def wide(tensor: Tensor) -> Tensor:
    """The numbers of a gradient, dense and in float64 (complex128)."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def norm64(tensor: Tensor) -> float:
    """The L2 norm, by Python's `hypot`, which is right to the last digit but one."""
    numbers = torch.view_as_real(wide(tensor)) if tensor.is_complex() else wide(tensor)
    return math.hypot(*numbers.reshape(-1).tolist())


class Loop:
    """Stands in a training loop for `loss.backward()`, clipping and `optimizer.step()`: here they are torch's."""

    scale = 1.0

    def backward(self, loss: Tensor, **options: Any) -> None:
        """`loss.backward()`."""
        loss.backward(**options)

    def clip(self, optimizer: Optimizer) -> None:
        """The user's clipping, of everything this optimizer holds."""
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], MAX_NORM)

    def note(self, optimizer: Optimizer) -> None:
        """Expect a step of this optimizer with the gradients as they are now."""

    def noted(self, norms: dict[str, float]) -> None:
        """Expect a step with these gradients, which nothing clips."""

    def step(self, optimizer: Optimizer, clip: bool = True) -> None:
        """Clip, expect, step."""
        if clip:
            self.clip(optimizer)
        self.note(optimizer)
        optimizer.step()

    def discard(self, local: bool = True) -> None:
        """A window that ended without a step; `local` is False where its backwards were heard all the same."""


class Probe(Loop):
    """Also notes what should be seen."""

    def __init__(self, models: Callable[[], list[nn.Module]]) -> None:
        self.models = models
        self.expected: list[Expected] = []
        self._norm: dict[str, float] = {}
        self._local: dict[str, float] = {}

    def named(self) -> dict[str, nn.Parameter]:
        """Every parameter by the name it is reported under: its first, without what wraps the model."""
        models = self.models()
        prefixes = [""] if len(models) == 1 else [type(model).__name__ + "." for model in models]
        found: dict[nn.Parameter, str] = {}
        for prefix, model in zip(prefixes, models, strict=True):
            for name, param in model.named_parameters():
                found.setdefault(param, prefix + name.removeprefix("module.").removeprefix("_orig_mod."))
        return {name: param for param, name in found.items()}

    def backward(self, loss: Tensor, **options: Any) -> None:
        """`loss.backward()`; what it added to a gradient is what a tensor hook sees."""
        before = {name: None if p.grad is None else wide(p.grad).clone() for name, p in self.named().items()}
        for name, old in before.items():
            if old is None:  # what earlier backwards left has been cleared
                self._local.pop(name, None)
        loss.backward(**options)
        for name, param in self.named().items():
            if param.grad is None or not param.requires_grad or not param.numel():
                continue
            old, now = before.get(name), wide(param.grad)
            if old is not None and torch.equal(old, now):
                continue  # nothing arrived
            self._norm[name] = norm64(now) / self.scale
            added = norm64(now if old is None else now - old) / self.scale
            self._local[name] = max(added, self._local.get(name, 0.0))

    def note(self, optimizer: Optimizer) -> None:
        """Expect a step of this optimizer with the gradients as they are now."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = {name: p for name, p in self.named().items() if id(p) in own and name in self._norm}
        applied = {name: norm64(p.grad) for name, p in mine.items() if p.grad is not None}
        self.expected.append(
            Expected(
                norm={name: self._norm.pop(name) for name in mine},
                norm_applied=applied,
                norm_local={name: self._local.pop(name) for name in mine if name in self._local},
            )
        )

    def noted(self, norms: dict[str, float]) -> None:
        self.expected.append(Expected(dict(norms), dict(norms), dict(norms)))

    def discard(self, local: bool = True) -> None:
        """A window that ended without a step; `local` is False where its backwards were heard all the same."""
        self._norm.clear()
        if local:
            self._local.clear()
