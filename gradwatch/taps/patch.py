"""The one way in which gradwatch replaces an attribute of torch, or of a class that a script has made.

A tap gives the attribute and a function that makes the replacement; the first listener puts it in place, the last one
restores what was there. Where another library has replaced the attribute since, restoring would undo its patch, and
waiting would leave gradwatch in the way: so the replacement stays below the other one and only passes calls on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from gradwatch.runtime import guard
from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.taps.dynamo import untraced

L = TypeVar("L")
_ABSENT = object()


_lock = ForkSafeLock()  # held while a patch changes


class Layer(Generic[L]):
    """One replacement that a `Patch` has put in place; `listeners` is empty for good once a later one was made."""

    __slots__ = ("listeners", "made", "original")

    def __init__(self, original: Any) -> None:
        self.listeners: tuple[L, ...] = ()  # replaced, never changed: another one is known by identity
        self.original = original
        self.made: Any = None


class Patch(Generic[L]):
    """An attribute `name` of `owner` (a class, a module or an object), replaced while it has listeners.

    `make(layer)` returns what stands in the place of `layer.original`. It calls each of `layer.listeners`, and does
    exactly what the original does where there are none. A function is wrapped with `functools.wraps`, so that its name,
    its signature and `__wrapped__` stay; `OnLookup` needs no wrapper at all.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Layer[L]], Any]) -> None:
        self.owner, self.name = owner, name
        self._make = make
        self._layer: Layer[L] | None = None  # the last one that was put in place
        self._inherited = False  # the owner had no attribute of its own

    @property
    def listeners(self) -> tuple[L, ...]:
        """Listeners at present."""
        return () if self._layer is None else self._layer.listeners

    def listen(self, listener: L) -> Callable[[], None]:
        """Add a listener; the returned call removes it, and does nothing the second time. Thread-safe.

        Raises `AttributeError` where there is no such attribute, and `TypeError` for a class that cannot be changed.
        """
        waiting: list[Layer[L]] = []

        def remove() -> None:
            with _lock.held:
                if waiting:
                    self._remove(waiting[0], listener)
                    waiting.clear()  # last: where a signal has broken it off, the next call does the rest

        try:
            with _lock.held:
                layer = self._layer
                if layer is None or not (layer.listeners or self._in_place() is layer.made):
                    layer = self._put()
                waiting.append(layer)
                layer.listeners += (listener,)
            return remove
        except BaseException:  # what nothing listens to must not stay in place
            with _lock.held:
                if self._layer is not None:
                    self._remove(self._layer, listener)
            raise

    @contextlib.contextmanager
    def listening(self, listener: L) -> Iterator[None]:
        """`listen` for the length of a block."""
        remove = self.listen(listener)
        try:
            yield
        finally:
            remove()

    def _put(self) -> Layer[L]:
        found = self._in_place()
        self._inherited = found is _ABSENT
        layer = Layer[L](_inherited(self.owner, self.name) if self._inherited else found)
        layer.made = self._make(layer)
        self._layer = layer
        _set(self.owner, self.name, layer.made)
        return layer

    def _remove(self, layer: Layer[L], listener: L) -> None:
        at = next((i for i, one in enumerate(layer.listeners) if one is listener), len(layer.listeners))
        layer.listeners = layer.listeners[:at] + layer.listeners[at + 1 :]
        if not layer.listeners and self._in_place() is layer.made:
            if self._inherited:
                _delete(self.owner, self.name)
            else:
                _set(self.owner, self.name, layer.original)
            self._layer = None

    def _in_place(self) -> Any:
        return vars(self.owner).get(self.name, _ABSENT)


class OnLookup:
    """Stand-in for a method: each listener is called with the instance on which it is looked up.

    The lookup gives the method itself, so that no frame of gradwatch is on the stack while it runs, nor in the
    traceback of one that raises. A lookup on the class gives None for the instance. `once` is called before the
    listeners, if there are any.
    """

    def __init__(
        self,
        owner: type,
        name: str,
        layer: Layer[Callable[[Any], object]],
        once: Callable[[Any], object] | None = None,
    ) -> None:
        self._place = owner, name
        self._layer = layer
        self._once = once
        # Another library may have put there what is no descriptor: it is given as it is.
        self._get = getattr(layer.original, "__get__", lambda *_: layer.original)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what stands there in the process that reads it, for a class pickled by value (cloudpickle)."""
        return getattr, self._place

    @untraced
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        try:
            listeners = self._layer.listeners
            if listeners and self._once is not None:
                self._once(instance)
            for listener in listeners:
                listener(instance)
            return self._get(instance, owner)
        except Exception as error:
            guard.fault("capture", error)
        return self._get(instance, owner)


def _inherited(owner: Any, name: str) -> Any:
    """The raw attribute that an owner inherits from its bases."""
    bases = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    found = next((vars(base)[name] for base in bases if name in vars(base)), _ABSENT)
    return getattr(owner, name) if found is _ABSENT else found


# Past a metaclass and past a `__setattr__` of the owner's, which may look at what it is given.
def _set(owner: Any, name: str, value: Any) -> None:
    (type if isinstance(owner, type) else object).__setattr__(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    (type if isinstance(owner, type) else object).__delattr__(owner, name)
