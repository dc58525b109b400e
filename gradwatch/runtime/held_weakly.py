"""Objects held weakly: how many there were, and which have died, without running Python where they die.

A callback in Python would run in the midst of any code of the script, the garbage collector's included, where what a
signal handler raises goes nowhere. The callback here is `list.append`: whoever minds looks later whether the list is
empty, which costs no call at all, and empties it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MANY = 64  # objects remembered before those that are gone are dropped

died: list[weakref.ref[Any]] = []
"""References that were `noted`, and whose object has died since this was emptied last."""


def noted(one: T) -> weakref.ref[T]:
    """A weak reference to an object whose death is noted."""
    return weakref.ref(one, died.append)


class Distinct:
    """Counts each object once, at about 0.1 µs a call; two objects at one address in turn are two.

    What is remembered is at most twice what is alive. `last()` is what was added last, None where that is gone: whoever
    adds at every step looks first.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Callable[[], Any] = _nothing
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._prune_at = _MANY

    def add(self, found: Any) -> None:
        """Count `found` unless it has been counted."""
        known = self._seen.get(id(found))
        if known is not None and known() is found:
            self.last = known
            return
        self.count += 1
        self.last = self._seen[id(found)] = weakref.ref(found)
        if len(self._seen) > self._prune_at:
            self._seen = {key: ref for key, ref in list(self._seen.items()) if ref() is not None}
            self._prune_at = max(_MANY, 2 * len(self._seen))

    def reset(self) -> None:
        """Start at 0 again."""
        self.count, self.last = 0, _nothing
        self._seen = {}


def _nothing() -> None:
    """Nothing was added yet."""
