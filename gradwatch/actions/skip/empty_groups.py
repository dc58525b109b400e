"""Whether the step of an optimizer of other people can do with empty parameter lists: tried before it must.

Most loops over `group["params"]` find nothing to do there; a step that concatenates gradients, or divides by their
number, raises. It must not raise inside the user's step, so it is run once beforehand, by itself, and whatever it
has changed is put back. Where it may call another step that torch has hooked, it is not tried: other people's hooks
would be called for a step that is not taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.actions.skip.copies import Copy, params_of
from gradwatch.actions.skip.shadow_optimizer import unhooked
from gradwatch.taps.optimizers.inner import with_inner


class EmptiedGroups:
    """What is known of the types of optimizers, whose steps are called with a closure or without."""

    def __init__(self) -> None:
        self._known: dict[tuple[type[Optimizer], bool], bool] = {}

    def do_for(self, optimizer: Optimizer, with_closure: bool) -> bool:
        """Whether a step of this type raises nothing and moves nothing when its lists are empty."""
        key = type(optimizer), with_closure
        if key not in self._known:
            self._known[key] = not calls_another(optimizer) and does(optimizer, with_closure)
        return self._known[key]

    def refuse(self, optimizer: Optimizer) -> None:
        """A step of this type was withheld so, and did not come back."""
        for with_closure in (False, True):
            self._known[type(optimizer), with_closure] = False


def calls_another(optimizer: Optimizer) -> bool:
    """Whether its step may call another one that torch has hooked: of an optimizer it wraps, or of a base class."""
    own = {unhooked(vars(cls)["step"]) for cls in type(optimizer).__mro__ if "step" in vars(cls)}
    return len(own - {Optimizer.step}) > 1 or len(with_inner(optimizer)) > 1


def does(optimizer: Optimizer, with_closure: bool) -> bool:
    """Run its own step once, without torch's hooks, on emptied lists; put everything back."""
    step = unhooked(type(optimizer).step)
    copy = _copy(optimizer)
    fine = False
    with emptied(optimizer), _same_random_numbers(optimizer), contextlib.suppress(Exception):
        step(optimizer, *((_nothing,) if with_closure else ()))
        fine = True
    fine = fine and not copy.moved()
    copy.restore(of_params=not fine)
    return fine


@contextlib.contextmanager
def emptied(optimizer: Optimizer) -> Iterator[None]:
    """The parameter lists of its groups are empty meanwhile."""
    lists = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, _ in lists:
            group["params"] = []
        yield
    finally:
        for group, params in lists:
            group["params"] = params


def _copy(optimizer: Optimizer) -> Copy:
    """Weights included, for a step may reach them by a way of its own; without them where memory is short."""
    try:
        return Copy(optimizer, whole=True)
    except (MemoryError, RuntimeError):  # torch's own is a RuntimeError
        return Copy(optimizer, whole=False)


def _nothing() -> Tensor:
    """Stands for a closure: its backward has run."""
    return torch.zeros((), device="cpu")


def _same_random_numbers(optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """What the trial draws is not missing from the training."""
    devices = sorted({param.device.index for param in params_of(optimizer) if param.is_cuda})
    return torch.random.fork_rng(devices)
