"""What goes wrong, once or for good, from the middle of a training on.

All faults strike where real ones do, before or inside the backward: whoever guards a run meets them in the
gradients it is given. A fault is *transient* when every later batch, gradient and learning rate is as it should
be: a run that was protected from it can end where it would have ended without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.benchmarks.rescue.trainings import Batch, loss_of

GRADIENT = 2
"""Which parameter's gradient is spoilt: one in the middle of the backward."""


def identity(value: Tensor) -> Tensor:
    """Nothing happens to it."""
    return value


@dataclass(frozen=True)
class Fault:
    """`strikes(k)` tells whether it is at work `k` steps after its onset (k >= 0).

    Where it is: `loss` and `inputs` change the loss and the (embedded) inputs of the step, `gradient` one
    gradient on its way through the backward, `rate` is the factor on the learning rate.
    """

    name: str
    title: str
    transient: bool
    strikes: Callable[[int], bool] = lambda k: k == 0
    loss: Callable[[Tensor], Tensor] = identity
    inputs: Callable[[Tensor], Tensor] = identity
    gradient: Callable[[Tensor], Tensor] | None = None
    rate: float = 1.0

    @property
    def healthy(self) -> bool:
        """Whether this is the run in which nothing goes wrong."""
        return self.name == "none"

    @property
    def in_gradients(self) -> bool:
        """Whether gradients show it before it does harm; a wrong learning rate spoils weights with healthy ones."""
        return self.rate == 1.0


def one_nan(values: Tensor) -> Tensor:
    """The same tensor with NaN as its first element."""
    spoilt = values.clone()
    spoilt.view(-1)[0] = math.nan
    return spoilt


def flip_bit(values: Tensor, bit: int = 30) -> Tensor:
    """The same float32 tensor with one bit of its largest element flipped; bit 30 is the exponent's highest.

    A number below 1 becomes 2^128 times as large: finite, but its square is not.
    """
    spoilt = values.detach().clone()
    flat = spoilt.view(-1)
    largest = flat.abs().argmax()
    flat[largest] = (flat[largest].view(torch.int32) ^ (1 << bit)).view(torch.float32)
    return spoilt


def times(factor: float) -> Callable[[Tensor], Tensor]:
    """A multiplication."""
    return lambda value: value * factor


def _always(k: int) -> bool:
    return True


_ALL = (
    Fault("none", "none (healthy)", True, strikes=lambda k: False),
    Fault("nan", "NaN in one batch", True, inputs=one_nan),
    Fault("nan-gradient", "NaN in one gradient", True, gradient=one_nan),
    Fault("batch-x1000", "one batch × 1000", True, inputs=times(1000)),
    Fault("batch-x20", "one batch × 20", True, inputs=times(20)),
    Fault("bit-flip", "bit-flip in one gradient", True, gradient=flip_bit),
    Fault("loss-x64", "loss × 64, one step", True, loss=times(64)),
    Fault("loss-x50-every-25", "loss × 50 every 25 steps", True, lambda k: k % 25 == 0, loss=times(50)),
    Fault("rate-x20-for-20", "learning rate × 20 for 20 steps", True, lambda k: k < 20, rate=20),
    Fault("rate-x8", "learning rate × 8 for good", False, _always, rate=8),
    Fault("loss-x8", "loss × 8 for good", False, _always, loss=times(8)),
)

FAULTS = {fault.name: fault for fault in _ALL}


class Struck:
    """One fault at work on one model: what changes in a step, and nothing in the others."""

    def __init__(self, fault: Fault, model: nn.Module, onset: int) -> None:
        self._fault, self._onset, self._model = fault, onset, model
        self._entrance = next(
            (module for module in model.modules() if isinstance(module, nn.Embedding)), None
        )
        self._spoilt = list(model.parameters())[GRADIENT]

    def strikes(self, step: int) -> bool:
        """Whether the fault is at work in a step."""
        return step >= self._onset and self._fault.strikes(step - self._onset)

    def rate(self, step: int) -> float:
        """The factor on the learning rate."""
        return self._fault.rate if self.strikes(step) else 1.0

    def backward(self, step: int, batch: Batch) -> None:
        """Forward and backward of a step, spoilt if it is time."""
        if not self.strikes(step):
            loss_of(self._model, batch).backward()  # type: ignore[no-untyped-call]
            return
        fault, handles = self._fault, []
        if fault.gradient is not None:
            handles.append(self._spoilt.register_hook(fault.gradient))
        if self._entrance is None:
            batch = Batch(fault.inputs(batch.inputs), batch.targets)
        else:  # token ids cannot be scaled: what is looked up for them can
            handles.append(self._entrance.register_forward_hook(lambda _, __, out: fault.inputs(out)))
        try:
            fault.loss(loss_of(self._model, batch)).backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
