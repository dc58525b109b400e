"""The two loops in which a contender is timed.

`training_step` times all of an ordinary training step. That is what a user feels, but on a shared machine
forward and backward vary by more than a monitor costs. `Handover` times only what a monitor can touch:
gradients made by a real, untimed backward of a twin are handed to the watched parameters by autograd itself
(AccumulateGrad, post-accumulate hooks, end-of-backward callbacks: all run), and the optimizer's own
arithmetic is left out. What it cannot show: hooks that run one by one between the operations of a
long backward find colder caches than hooks that run in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.benchmarks.interleave import Sample
from tests.benchmarks.peers import Contender
from tests.benchmarks.workloads import Task

Result = TypeVar("Result")


def training_step(task: Task, contender: Contender) -> None:
    """One whole training step under watch."""
    with contender.guard():
        for _ in range(task.micros):
            task.forward().backward()
    contender.after_backward(task)
    task.optimizer.step()
    contender.after_step(task)
    task.optimizer.zero_grad(set_to_none=True)


class _Deliver(torch.autograd.Function):
    """A function of the parameters whose backward is the list of gradients it was given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = ctx.gradients
        # Autograd takes a gradient over without copying it only where nobody else holds the tensor.
        ctx.gradients = None
        return (None, *gradients)


class Handover:
    """From the first gradient's arrival to the end of `optimizer.step()`, less the optimizer's arithmetic.

    The carrier's forward and backward leave the caches as a training step does, full of other data and code.
    Make it after `contender.attach`, so that its clock is the last thing before the optimizer's arithmetic.
    """

    def __init__(self, carrier: Task, task: Task, contender: Contender) -> None:
        self._carrier, self._task, self._contender = carrier, task, contender
        self._began = self._inside = Sample(0.0, 0.0)
        # torch runs global step hooks before an optimizer's own, and after them once it has stepped.
        self._handles = [
            task.optimizer.register_step_pre_hook(self._arithmetic_begins),
            task.optimizer.register_step_post_hook(self._arithmetic_ends),
        ]

    def __call__(self) -> Sample:
        task, contender = self._task, self._contender
        spent = [self._arrive() for _ in range(task.micros - 1)]
        begin = self._deliver()
        contender.after_backward(task)
        task.optimizer.step()
        contender.after_step(task)
        spent.append(_since(begin))
        task.optimizer.zero_grad(set_to_none=True)
        self._carrier.optimizer.zero_grad(set_to_none=True)
        wall, cpu = (sum(clock) for clock in zip(*spent, strict=True))
        return Sample(wall - self._inside.wall, cpu - self._inside.cpu)

    def _arrive(self) -> Sample:
        """One micro-batch before the last: only its arrival is timed."""
        return _since(self._deliver())

    def _deliver(self) -> Sample:
        """Hand the gradients of a backward of the carrier over; when that began."""
        carrier = self._carrier
        carrier.optimizer.zero_grad(set_to_none=True)
        carrier.forward().backward()
        aliases = [gradient.detach() for gradient in carrier.gradients()]
        arrival = _Deliver.apply(aliases, *self._task.parameters)  # type: ignore[no-untyped-call]
        del aliases
        begin = _now()
        arrival.backward()
        return begin

    def close(self) -> None:
        """Take the clock out of the optimizer."""
        for handle in self._handles:
            handle.remove()

    def _arithmetic_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._began = _now()

    def _arithmetic_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._inside = Sample(*(now - began for now, began in zip(_now(), self._began, strict=True)))


def in_turn(contender: Contender, call: Callable[[], Result]) -> Callable[[], Result]:
    """The call, made while the contender is not suspended."""

    def inside() -> Result:
        contender.resume()
        try:
            return call()
        finally:
            contender.suspend()

    return inside


def _since(begin: Sample) -> Sample:
    end = _now()
    return Sample(end.wall - begin.wall, end.cpu - begin.cpu)


def _now() -> Sample:
    return Sample(time.perf_counter(), time.process_time())
