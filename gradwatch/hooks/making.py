"""Optimizers being made, noticed: the earliest sign that a process is going to train.

torch has hooks around the steps of an optimizer and none on its making. `Optimizer.__init__` is not wrapped but looked
up: a frame of ours would stand in the traceback wherever torch refuses what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradwatch.taps import guard
from gradwatch.taps.process_totals import TOTALS

_listeners: list[Callable[[], None]] = []


class _Noticed:
    """In the place of `Optimizer.__init__`: tells when it is looked up, and is out of the way when it is called."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, instance: Optimizer | None, owner: type[Optimizer] | None = None) -> Any:
        TOTALS.optimizers += instance is not None
        try:
            for listener in tuple(_listeners):
                listener()
        except Exception as error:
            guard.fault("capture", error)
        return self.original.__get__(instance, owner)


def listen(about_to_make: Callable[[], None]) -> Callable[[], None]:
    """Call `about_to_make` before any optimizer is initialised; the returned call ends that. It must not raise.

    The optimizer has no parameters yet. The last listener out puts the class back as found.
    """
    _listeners.append(about_to_make)
    found = vars(Optimizer)["__init__"]
    if not isinstance(found, _Noticed):
        setattr(Optimizer, "__init__", _Noticed(found))  # noqa: B010  (mypy: a method is being assigned to)

    def remove() -> None:
        if about_to_make in _listeners:
            _listeners.remove(about_to_make)
        now = vars(Optimizer)["__init__"]
        if not _listeners and isinstance(now, _Noticed):  # else somebody put theirs there since
            setattr(Optimizer, "__init__", now.original)  # noqa: B010

    return remove
