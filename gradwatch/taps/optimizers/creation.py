"""Optimizers being made, noticed: the earliest sign that a process is going to train.

torch has hooks around the steps of an optimizer and none on its making. `Optimizer.__init__` is not wrapped but looked
up: a frame of gradwatch would stand in the traceback wherever torch refuses what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradwatch.taps.patch import Layer, OnLookup, Patch
from gradwatch.taps.process_totals import TOTALS


def _make(layer: Layer[Callable[[Any], object]]) -> OnLookup:
    return OnLookup(Optimizer, "__init__", layer, TOTALS.count_optimizer)


_init = Patch(Optimizer, "__init__", _make)
_states: Patch[Callable[[Optimizer | None], object]] = Patch(
    Optimizer, "__setstate__", lambda layer: OnLookup(Optimizer, "__setstate__", layer)
)


def listen(about_to_make: Callable[[Optimizer | None], object]) -> Callable[[], None]:
    """Call `about_to_make(optimizer)` before any optimizer is initialised; the returned call ends that.

    The optimizer has no parameters yet; it is None where a subclass names the class, as `Optimizer.__init__(self, …)`,
    to call it. The listener must not raise. Not noticed: `super(Optimizer, …)`, copies and unpickled optimizers, which
    are not initialised (`listen_filled`).
    """
    return _init.listen(about_to_make)


def listen_filled(about_to_fill: Callable[[Optimizer | None], object]) -> Callable[[], None]:
    """Call `about_to_fill(optimizer)` before one is given its state: a copy, unpickled, or by `load_state_dict`.

    Otherwise as `listen`.
    """
    return _states.listen(about_to_fill)
