"""Optimizers being made, noticed: the earliest sign that a process is going to train.

torch has hooks around the steps of an optimizer and none on its making. `Optimizer.__init__` is not wrapped but looked
up: a frame of gradwatch would stand in the traceback wherever torch refuses what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradwatch.runtime import guard
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.process_totals import TOTALS

Listener = Callable[[Optimizer | None], None]

_listeners: list[Listener] = []


class _Noticed:
    """In the place of `Optimizer.__init__`: calls the listeners when it is looked up, and is not there when it runs."""

    def __init__(self, original: Any) -> None:
        self.original = original

    @untraced
    def __get__(self, instance: Optimizer | None, owner: type[Optimizer] | None = None) -> Any:
        try:
            TOTALS.optimizers += instance is not None
            for listener in tuple(_listeners):
                listener(instance)
            return self.original.__get__(instance, owner)
        except Exception as error:
            guard.fault("capture", error)
        return self.original.__get__(instance, owner)


def listen(about_to_make: Listener) -> Callable[[], None]:
    """Call `about_to_make(optimizer)` before any optimizer is initialised; the returned call ends that.

    The optimizer has no parameters yet; it is None where a subclass names the class, as `Optimizer.__init__(self, …)`,
    to call it. The listener must not raise. The last listener out puts the class back as
    found. Not noticed: `super(Optimizer, …)`, copies and unpickled optimizers, which are not initialised.
    """
    _listeners.append(about_to_make)
    found = vars(Optimizer)["__init__"]
    if not isinstance(found, _Noticed):
        setattr(Optimizer, "__init__", _Noticed(found))  # noqa: B010  (mypy: a method is being assigned to)

    def remove() -> None:
        if about_to_make in _listeners:
            _listeners.remove(about_to_make)
        now = vars(Optimizer)["__init__"]
        if not _listeners and isinstance(now, _Noticed):  # else another library has replaced it since
            setattr(Optimizer, "__init__", now.original)  # noqa: B010

    return remove
