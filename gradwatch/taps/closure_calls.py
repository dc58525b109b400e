"""Every call of an optimizer's closure, noticed just before it runs and just after it returned.

A closure runs the backward inside `optimizer.step(closure)`, so that the step's own hooks come too early. An object
stands in its place. Python looks `__call__` up on the object's class, where it is a descriptor: the lookup runs the
first listener and gives a callable put together from functions of the standard library that are written in C. So no
frame of gradwatch is on the stack while the closure runs, nor in the traceback of one that raises.

That callable takes no arguments, and torch gives none. Where other code calls a closure that could take some, one
frame is there.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from gradwatch.runtime import guard
from gradwatch.taps.dynamo import untraced, untraced_itself

Closure = Callable[..., Any]
# Those of each call; other code may keep what it looked up, and call it again.
_NO_ARGUMENTS = itertools.repeat(())
_ANY_NUMBER = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_DECORATED = torch.enable_grad()(lambda: None).__code__  # what `torch.enable_grad()(closure)` runs


def notice(closure: Closure, before: Callable[[], None], after: Callable[[], None]) -> Closure:
    """Wrap `closure` for an optimizer: `before` and `after` run around every call that returns."""
    return _Noticed(closure, before, after)


def noticed(closure: Any) -> bool:
    """True if this is what `notice` returned, as it is or decorated with `torch.enable_grad()` or the like."""
    while type(closure) is FunctionType and closure.__code__ is _DECORATED:
        closure = closure.__wrapped__  # type: ignore[attr-defined]
    return type(closure) is _Noticed


def code_of(closure: Any) -> CodeType | None:
    """The code that a call of this closure runs first; None where none is known (written in C, or no closure)."""
    while True:
        kind = type(closure)
        if kind is _Noticed:
            closure = _closure(closure)
        elif kind is partial:
            closure = closure.func
        elif kind is MethodType:
            closure = closure.__func__
        elif kind is FunctionType:
            return closure.__code__  # type: ignore[no-any-return]
        else:
            call = getattr(kind, "__call__", None)  # noqa: B004  (of an object: the one that takes it)
            return call.__code__ if type(call) is FunctionType else None


class _Call:
    """Stand-in for `_Noticed.__call__`."""

    @untraced
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        try:
            if instance is None:
                return self
            closure = _closure(instance)
            _before(instance)()
            returned = _returned(_after(instance))
            if _takes_nothing(closure) or _called_by_torch(instance, sys._getframe(1)):
                return map(returned, itertools.starmap(closure, _NO_ARGUMENTS)).__next__
            return _with_arguments(closure, returned)
        except Exception as error:
            guard.fault("boundary", error)
        return _closure(instance)


class _Noticed:
    """Stand-in for a closure: its attributes are those of the closure, asked for, set and deleted."""

    __slots__ = ("__weakref__", "after", "before", "closure")
    __call__ = _Call()

    def __init__(self, closure: Closure, before: Callable[[], None], after: Callable[[], None]) -> None:
        for name, value in (("closure", closure), ("before", before), ("after", after)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "__call__" else getattr(_closure(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_closure(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_closure(self), name)

    def __repr__(self) -> str:
        return repr(_closure(self))

    def __bool__(self) -> bool:
        return bool(_closure(self))


# Past `__getattribute__`, which asks the closure.
_closure, _before, _after = (vars(_Noticed)[name].__get__ for name in ("closure", "before", "after"))


def _returned(after: Callable[[], None]) -> Callable[[Any], Any]:
    """Runs `after` and gives what the closure returned."""

    @untraced
    def returned(result: Any) -> Any:
        try:
            after()
            return result
        except Exception as error:
            guard.fault("boundary", error)
        return result

    return returned


def _with_arguments(closure: Closure, returned: Callable[[Any], Any]) -> Closure:
    @untraced_itself
    def call(*args: Any, **kwargs: Any) -> Any:
        return returned(closure(*args, **kwargs))

    return call


def _takes_nothing(closure: Any, given: int = 0) -> bool:
    """True if it is known that a call with any argument more than those `given` would raise."""
    kind = type(closure)
    if kind is MethodType:
        return _takes_nothing(closure.__func__, given + 1)
    if kind is partial:
        return not closure.keywords and _takes_nothing(closure.func, given + len(closure.args))
    if kind is FunctionType:
        code = closure.__code__
        return not code.co_kwonlyargcount and code.co_argcount <= given and not code.co_flags & _ANY_NUMBER
    call = getattr(kind, "__call__", None)  # noqa: B004  (of an object: the one that takes it)
    return type(call) is FunctionType and _takes_nothing(call, given + 1)


def _called_by_torch(instance: object, caller: FrameType) -> bool:
    """True if code of torch's calls, which gives a closure no arguments."""
    if caller.f_code is _DECORATED:
        found = caller.f_locals
        return found.get("func") is instance and not found.get("args") and not found.get("kwargs")
    of_torch = caller.f_globals.get("__name__", "").startswith("torch.optim.")
    return of_torch and caller.f_locals.get("closure") is instance
