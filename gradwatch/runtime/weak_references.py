"""Objects held weakly, or as long as another lives, without running Python where they die.

A callback in Python would run in the midst of any code of the script, the garbage collector's included, where what a
signal handler raises goes nowhere. That of `noted` is `list.append`: whoever minds looks later whether the list is
empty, which costs no call at all, and empties it. That of `emptied_with` is `list.__setitem__`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_ALONE = {0: object()}
_OF_THE_CALL = sys.getrefcount(_ALONE[0]) - 1
"""References that `sys.getrefcount(mapping[k])` counts of its own, as found on an object that only a mapping holds."""
_MANY = 64  # objects remembered before those that are gone are dropped

died: list[weakref.ref[Any]] = []
"""References that were `noted`, and whose object has died since this was emptied last."""


def noted(one: T) -> weakref.ref[T]:
    """A weak reference to an object whose death is noted."""
    return weakref.ref(one, died.append)


class _Empty(weakref.ref[Any]):
    """A weak reference that is an empty sequence to whoever iterates over it, and runs no Python then."""

    __slots__ = ()
    __iter__ = staticmethod(functools.partial(iter, ()))


def emptied_with(owner: object, objects: list[Any]) -> weakref.ref[Any]:
    """Empty a list where `owner` dies, so that what it held is freed then and there unless others hold it.

    What is returned refers to the owner; it must be kept as long as this is wanted.
    """
    # A callback is given the reference, and so this is `objects[:] = reference`.
    return _Empty(owner, functools.partial(list.__setitem__, objects, slice(None)))


class HeldByOwner(Generic[T]):
    """Objects by number, each held as long as its owner lives; `gone` stands for those whose owner has died."""

    def __init__(self, gone: T) -> None:
        self._gone = gone
        self._forever: list[dict[int, T]] = [{}]  # what has no owner
        self._owners: list[weakref.ref[Any]] = []  # the last one last
        self._held: list[list[dict[int, T]]] = []  # for each owner, by number: a list that its death empties
        self._by_number: list[list[dict[int, T]]] = []  # for each number that of its owner

    def __len__(self) -> int:
        return len(self._by_number)

    def __getitem__(self, number: int) -> T:
        held = self._by_number[number]
        return held[0].get(number, self._gone) if held else self._gone

    def reserve(self) -> int:
        """A number that nothing has been held under."""
        self._by_number.append(self._forever)
        return len(self._by_number) - 1

    def hold(self, numbers: Sequence[int], objects: Sequence[T], owner: object | None) -> None:
        """Hold these under these numbers, as long as `owner` lives (None: until they are dropped)."""
        held = self._forever if owner is None else self._of(owner)
        for number, one in zip(numbers, objects, strict=True):
            before = self._by_number[number]
            if before is not held:
                if before:
                    before[0].pop(number, None)
                self._by_number[number] = held
            held[0][number] = one

    def drop(self, number: int) -> None:
        """Hold nothing under this number any more."""
        for held in self._by_number[number]:
            held.pop(number, None)
        self._by_number[number] = self._forever

    def owner(self, number: int) -> object | None:
        """The owner of what is held under this number; None where it has none, or has died."""
        held = self._by_number[number]
        return next((ref() for ref, each in zip(self._owners, self._held, strict=True) if each is held), None)

    def references(self, number: int) -> int:
        """Number of references to what is held under this number, this one included."""
        return sys.getrefcount(self._by_number[number][0][number]) - _OF_THE_CALL

    def lost(self) -> list[int]:
        """The numbers whose owner has died, until they are dropped or hold another."""
        if all(self._held):
            return []
        lost = [number for number, held in enumerate(self._by_number) if not held]
        if not lost:
            self._owners = [ref for ref, held in zip(self._owners, self._held, strict=True) if held]
            self._held = [held for held in self._held if held]
        return lost

    def clear(self) -> None:
        """Hold nothing any more."""
        self._forever[0].clear()
        self._owners, self._held, self._by_number = [], [], []

    def _of(self, owner: object) -> list[dict[int, T]]:
        for ref, held in zip(reversed(self._owners), reversed(self._held), strict=True):
            if ref() is owner:
                return held
        held = [{}]
        self._owners.append(emptied_with(owner, held))
        self._held.append(held)
        return held


class Refs(set[weakref.ref[T]]):
    """Objects held weakly: `weakref.ref(one) in refs` and `refs.add(weakref.ref(one))` run no Python, nor does a death.

    `weakref.WeakSet` has a callback in Python. Here those that are gone stay until `drop_dead`, for which whoever adds
    to a set of more than `most` asks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = _MANY

    def alive(self) -> list[T]:
        """The objects that live."""
        return [one for ref in list(self) if (one := ref()) is not None]

    def drop_dead(self) -> None:
        """Drop the references to what is gone."""
        self.difference_update([ref for ref in self if ref() is None])
        self.most = max(_MANY, 2 * len(self))


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
    """No-op: nothing was added yet."""
