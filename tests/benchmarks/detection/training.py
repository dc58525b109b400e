"""The common form of the trainings: what one of them is made of, and the loop that takes its steps.

Every place of the loop at which a user's script can go wrong calls the fault: a live fault overrides one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]


def constant(step: int) -> float:
    """The learning rate stays as it is."""
    return 1.0


def nothing(step: int) -> None:
    """Nothing more is done after a step."""


@dataclass
class Phase:
    """One optimizer, and the loss that it minimises."""

    optimizer: Optimizer
    loss: Callable[[Batch], Tensor]


@dataclass
class Training:
    """A model that is being trained.

    `batch(step)` draws a micro-batch, `micro` of them make a step; with several `phases` (a GAN) one batch serves all.
    `rate(step)` is a factor on the learning rate. `max_norm`: the loop clips the total norm. `closure`: the optimizer
    calls forward and backward itself. `after(step)` ends a step, `close` the training.
    """

    model: nn.Module
    phases: Sequence[Phase]
    batch: Callable[[int], Batch]
    rate: Callable[[int], float] = constant
    micro: int = 1
    max_norm: float | None = None
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    closure: bool = False
    after: Callable[[int], None] = nothing
    close: Callable[[], None] | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order of their phases."""
        return [phase.optimizer for phase in self.phases]


def single(
    model: nn.Module, optimizer: Optimizer, loss: Callable[[Batch], Tensor], batch: Callable[[int], Batch]
) -> Training:
    """A training with one optimizer."""
    return Training(model, [Phase(optimizer, loss)], batch)


class Fault:
    """What goes wrong in a loop; this one is none.

    `onset`: the first step at which something does. `horizon`: the steps from there in which it has to be found.
    """

    onset = 0

    @property
    def horizon(self) -> int:
        """None."""
        return 0

    def attach(self, training: Training) -> None:
        """Change what is built, before it is watched."""

    def start_step(self, step: int) -> None:
        """Before anything else of a step."""

    def rate(self, step: int) -> float:
        """A factor on the learning rate."""
        return 1.0

    def zeroes_gradients(self, step: int) -> bool:
        """False if the loop leaves out `zero_grad()`."""
        return True

    def batch(self, step: int, batch: Batch) -> Batch:
        """The batch that the model is given instead."""
        return batch

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """The loss that backward is called on instead."""
        return loss

    def after_backward(self, step: int) -> None:
        """Gradients are there; neither unscaled nor clipped."""

    def unscales(self, step: int) -> bool:
        """False if the loop clips gradients that still carry the GradScaler's scale."""
        return True

    def before_optimizer(self, step: int) -> None:
        """Between the loop's own clip and `optimizer.step()`."""

    def after_step(self, step: int) -> None:
        """The optimizers have stepped."""


class Loop:
    """The steps of a training with a fault."""

    def __init__(self, training: Training, fault: Fault) -> None:
        self.training, self.fault = training, fault
        fault.attach(training)
        self._rates = [[group["lr"] for group in one.param_groups] for one in training.optimizers]

    def step(self, step: int) -> float:
        """One step of every optimizer; returns the loss of the last."""
        training, fault = self.training, self.fault
        fault.start_step(step)
        self._set_rates(step)
        batches = [fault.batch(step, training.batch(step)) for _ in range(training.micro)]
        loss = 0.0
        for phase in training.phases:
            loss = (
                self._closure(phase, step, batches) if training.closure else self._phase(phase, step, batches)
            )
        fault.after_step(step)
        training.after(step)
        return loss

    def _set_rates(self, step: int) -> None:
        factor = self.training.rate(step) * self.fault.rate(step)
        for optimizer, rates in zip(self.training.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def _phase(self, phase: Phase, step: int, batches: Sequence[Batch]) -> float:
        training, fault, scaler = self.training, self.fault, self.training.scaler
        loss = self._gradients(phase, step, batches)
        fault.after_backward(step)
        if scaler is not None and training.max_norm is not None and fault.unscales(step):
            scaler.unscale_(phase.optimizer)
        if training.max_norm is not None:
            nn.utils.clip_grad_norm_(_owned(phase.optimizer), training.max_norm)
        fault.before_optimizer(step)
        if scaler is None:
            phase.optimizer.step()
        else:
            scaler.step(phase.optimizer)
            scaler.update()
        return loss

    def _closure(self, phase: Phase, step: int, batches: Sequence[Batch]) -> float:
        loss = 0.0

        def closure() -> float:
            nonlocal loss
            loss = self._gradients(phase, step, batches)
            self.fault.after_backward(step)
            return loss

        self.fault.before_optimizer(step)
        phase.optimizer.step(closure)
        return loss

    def _gradients(self, phase: Phase, step: int, batches: Sequence[Batch]) -> float:
        if self.fault.zeroes_gradients(step):
            phase.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            with self._precision():
                loss = phase.loss(batch)
            loss = self.fault.loss(step, loss) / len(batches)
            total += float(loss.detach())
            if loss.requires_grad:
                scaled = loss if self.training.scaler is None else self.training.scaler.scale(loss)
                scaled.backward()
        return total

    def _precision(self) -> AbstractContextManager[object]:
        dtype = self.training.autocast
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _owned(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
