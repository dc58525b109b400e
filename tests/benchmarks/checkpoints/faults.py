"""What ruins a training, begun at one of its steps; each is what users have done or met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

START, MIDDLE = 0, 107
"""No multiple of what checkpoints are apart."""


@dataclass(frozen=True)
class Fault:
    """`once(model, optimizers)` at the beginning of step `begins`; the loss is multiplied by `sign` from there on.

    Or, where it is given, for so many `steps`.
    """

    name: str
    begins: int
    once: Callable[[nn.Module, list[Optimizer]], None] = lambda model, optimizers: None
    sign: float = 1.0
    steps: int | None = None


def rate(factor: float, begins: int = MIDDLE, part: int | None = None) -> Fault:
    """The learning rate of all optimizers, or of one, is `factor` times what is good."""

    def once(model: nn.Module, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers if part is None else [optimizers[part]]:
            for group in optimizer.param_groups:
                group["lr"] *= factor

    return Fault(f"lr x{factor:g}" + ("" if part is None else f" of optimizer {part}"), begins, once)


def _weights(name: str, change: Callable[[nn.Parameter], None], only: str = "") -> Fault:
    def once(model: nn.Module, optimizers: list[Optimizer]) -> None:
        with torch.no_grad():
            for path, param in model.named_parameters():
                if only in path and param.ndim > 1:
                    change(param)

    return Fault(name, MIDDLE, once)


def scaled(factor: float, only: str) -> Fault:
    """One layer's weights become `factor` times as large."""
    return _weights(f"{only} x{factor:g}", lambda param: param.mul_(factor), only)


def shuffled() -> Fault:
    """Every matrix keeps its numbers, in another order: as a checkpoint that is read with wrong strides."""

    def change(param: nn.Parameter) -> None:
        order = torch.randperm(param.numel(), generator=torch.Generator().manual_seed(3))
        param.copy_(param.flatten()[order].view_as(param))

    return _weights("weights shuffled", change)


def bits_flipped(only: str = "") -> Fault:
    """The highest exponent bit that keeps a weight finite is set in one element of a thousand."""

    def change(param: nn.Parameter) -> None:
        flat = param.view(-1)
        chosen = torch.randperm(len(flat), generator=torch.Generator().manual_seed(4))[
            : 1 + len(flat) // 1000
        ]
        flat[chosen] = flat[chosen] * 2.0**64

    return _weights("exponent bits flipped", change, only)


def zeroed(only: str) -> Fault:
    """A layer's weights are zero."""
    return _weights(f"{only} zeroed", lambda param: param.zero_(), only)


def ascent() -> Fault:
    """The sign of the loss is wrong."""
    return Fault("loss negated", MIDDLE, sign=-1.0)


def burst(factor: float, steps: int = 1) -> Fault:
    """Some batches whose gradients are `factor` times as large: broken targets."""
    return Fault(f"{steps} losses x{factor:g}", MIDDLE, sign=factor, steps=steps)
