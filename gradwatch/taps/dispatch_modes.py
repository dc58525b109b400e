"""The script's `TorchDispatchMode`s and `TorchFunctionMode`s, set aside while gradwatch reads.

A mode sees every operation of its thread: a FLOP counter, a profiler or a recorder would count gradwatch's reads as the
training's. Switching dispatch off altogether would also switch off that of tensor subclasses (DTensor), so the modes
are taken off torch's stacks and restored. torch's own default device is a function mode too; it shows nothing to the
script, code that is run again needs it, and it stays.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gradwatch.taps.dynamo import untraced

T = TypeVar("T")

# By name: to walk torch's module from cold caches costs microseconds.
dispatching: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are active in this thread."""
functions: Callable[[], int] = torch._C._len_torch_function_stack
"""How many function modes are active in this thread, the default device included."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switch grad mode in this thread: a tenth of `with torch.no_grad()` in cold caches."""
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""False where autocast is off for every device in this thread; True also where torch does not tell."""
dispatch_disabled: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes
"""No dispatch mode sees what runs inside, in this thread."""
_tracing = torch.compiler.is_dynamo_compiling  # the lengths of the stacks would break its graph
_dispatch_at, _function_at = torch._C._get_dispatch_stack_at, torch._C._get_function_stack_at
_pop_dispatch, _pop_function = torch._C._pop_torch_dispatch_stack, torch._C._pop_torch_function_stack
_push_dispatch, _push_function = (
    torch._C._push_on_torch_dispatch_stack,
    torch._C._push_on_torch_function_stack,
)


class DispatchMode(TorchDispatchMode):
    """Base of a mode that runs every operation of its thread, whose `__torch_dispatch__` is `untraced`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch shall not wrap the method, which puts two frames of its own around it and imports dynamo."""
        return False


def innermost_dispatch() -> Any:
    """The dispatch mode that this thread entered last and has not left; None without any."""
    depth = dispatching()
    return _dispatch_at(depth - 1) if depth else None


def beneath(mode: TorchDispatchMode) -> bool:
    """True if another dispatch mode was entered since `mode`, and neither has been left."""
    return any(_dispatch_at(at) is mode for at in range(dispatching() - 1))


def enter(mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Make a mode the innermost of its kind in this thread."""
    mode.__enter__()  # type: ignore[no-untyped-call]


def leave_dispatch(mode: TorchDispatchMode) -> None:
    """Leave a dispatch mode that is the innermost one; does nothing where another is, or none."""
    if innermost_dispatch() is mode:
        try:
            mode.__exit__(None, None, None)
        finally:
            if innermost_dispatch() is mode:  # broken off inside torch
                _pop_dispatch(None)


def leave_function(mode: TorchFunctionMode) -> None:
    """Leave a function mode that is the innermost one; does nothing where another is, or none."""
    depth = functions()
    if depth and _function_at(depth - 1) is mode:
        mode.__exit__(None, None, None)


class _Here(threading.local):
    outermost: Aside | None = None  # of this thread


_here = _Here()


class Aside:
    """Takes this thread's modes off torch's stacks when it is made; `put_back` must follow, in the same thread."""

    __slots__ = ("_dispatch", "_function", "_off")

    def __init__(self) -> None:
        self._off = False
        self.take()

    def take(self) -> None:
        """Take what is on the stacks now."""
        self._dispatch = [_dispatch_at(k) for k in range(dispatching())]
        self._function = [_function_at(k) for k in range(functions())]
        try:
            self._off = True
            if _here.outermost is None:
                _here.outermost = self
            self._leave(self._devices(), [])
        except BaseException:  # the script's, from a signal handler: its modes must be there
            self.put_back()
            raise

    def put_back(self) -> None:
        """Put both stacks back as they were found; does nothing where they are."""
        try:
            self._put_back()
        finally:  # once more: what arrived at the first must not leave the script without its modes
            self._put_back()

    def _put_back(self) -> None:
        if self._off:
            self._leave(self._function, self._dispatch)
            if _here.outermost is self:
                _here.outermost = None
            self._off = False

    def _devices(self) -> list[Any]:
        return [mode for mode in self._function if isinstance(mode, DeviceContext)]

    @staticmethod
    def _leave(function: list[Any], dispatch: list[Any]) -> None:
        """Have these modes on the stacks, and no others."""
        if [_function_at(k) for k in range(functions())] != function:
            while functions():
                _pop_function()
            for mode in function:
                _push_function(mode)
        if [_dispatch_at(k) for k in range(dispatching())] != dispatch:
            while dispatching():
                _pop_dispatch(None)
            for mode in dispatch:
                _push_dispatch(mode)


@contextlib.contextmanager
def as_found() -> Iterator[None]:
    """Stacks as the script has them, inside an `Aside`, to look at, or to enter or leave a mode of gradwatch's."""
    aside = _here.outermost
    if aside is None:
        yield
        return
    aside.put_back()
    try:
        yield
    finally:
        aside.take()


@untraced
def unseen(call: Callable[..., T], *args: Any) -> T:
    """Run `call(*args)` without the script's modes; where dynamo captures the caller, with them."""
    if _tracing() or (not dispatching() and not functions()):
        return call(*args)
    aside = Aside()
    try:
        try:
            return call(*args)
        finally:
            aside.put_back()
    finally:  # once more: what arrives at the line before must not leave the script without its modes
        aside.put_back()
