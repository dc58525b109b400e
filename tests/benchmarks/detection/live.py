"""Faults that are put into the loop while a model is trained, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

import torch
from torch import Tensor, nn

from tests.benchmarks.detection.training import Fault, Training

ONSET = (120, 260)
"""The first steps of a fault lie between these."""
LASTING, ONCE = 120, 5
"""Steps on which a fault that lasts, or one of a single step, has to be found."""
DRIFT = 342
"""Steps of 1 % until a factor of 30."""


class UnfitError(Exception):
    """This training has no place for this fault."""


class LiveFault(Fault):
    """A fault from `onset` on, for good unless it is `transient`.

    `culprits` are the parameters at fault, as gradwatch names them; empty where the whole model is.
    """

    transient = False
    from_start = False
    lasting = LASTING

    def __init__(self, random: Random) -> None:
        self.random = random
        self.onset = 0 if self.from_start else random.randrange(*ONSET)
        self.culprits: frozenset[str] = frozenset()

    @property
    def horizon(self) -> int:
        """Steps from the onset on which it has to be found."""
        return ONCE if self.transient else self.lasting

    def active(self, step: int) -> bool:
        """True on the steps that have the fault."""
        return step == self.onset if self.transient else step >= self.onset

    def attach(self, training: Training) -> None:
        """Keep what is trained; subclasses choose where the fault is."""
        self.training = training

    def parameters(self) -> Iterator[nn.Parameter]:
        """All that the optimizers hold."""
        for optimizer in self.training.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]


class BlockFault(LiveFault):
    """A fault of one layer: a module with a weight of two dimensions or more that is trained."""

    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LSTM, nn.GRU)

    def attach(self, training: Training) -> None:
        """Choose the layer."""
        super().attach(training)
        trained = {id(parameter) for parameter in self.parameters()}
        found = [
            (name.removeprefix("module."), module)
            for name, module in training.model.named_modules()
            if isinstance(module, self.kinds)
            and all(id(one) in trained and one.requires_grad for one in module.parameters())
            and self.suits(module)
        ]
        if len(found) < 2:
            raise UnfitError("fewer than two layers")
        name, self.module = self.random.choice(found)
        self.culprits = frozenset(f"{name}.{own}" for own, _ in self.module.named_parameters())
        self.block = list(self.module.parameters())

    def suits(self, module: nn.Module) -> bool:
        """True if this layer can have the fault."""
        return True

    def scale_in_backward(self, factor: Callable[[], float], parameters: Iterable[nn.Parameter]) -> None:
        """Multiply gradients where autograd makes them."""
        for parameter in parameters:
            parameter.register_hook(lambda gradient: gradient * factor())


def one_element(values: Tensor, value: float) -> Tensor:
    """The same tensor with another first element."""
    changed = values.clone()
    changed.view(-1)[0] = value
    return changed


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply what is in `.grad`, as a script would do it."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
