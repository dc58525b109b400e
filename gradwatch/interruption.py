"""Tells an exception that the script's own signal handler raised from a fault of ours.

Python runs a signal handler between any two bytecodes of the main thread. While C++ runs a backward, the next
bytecode is that of a hook of ours, so a `TimeoutError` or `Preempted` that the script raises from its handler
arrives inside our guards: what is swallowed there never stops the script.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def by_signal_handler(error: BaseException) -> bool:
    """Whether a Python signal handler that is installed now was running when `error` was raised.

    Read off the traceback of `error` and of what it was raised from; a handler that has no Python code of its own
    (a C function) is not recognised.
    """
    handlers = set(_handlers())
    return bool(handlers) and any(code in handlers for code in _raised_through(error))


def _handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        code = _code(signal.getsignal(number))
        if code is not None:
            yield code


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, (partial, MethodType)):
        handler = handler.func if isinstance(handler, partial) else handler.__func__
    if not isinstance(handler, FunctionType):
        handler = _call_of(type(handler))  # an object that is called
    return handler.__code__ if isinstance(handler, FunctionType) else None


def _call_of(kind: type) -> Any:
    """`__call__` of its instances; not that of its metaclass, which makes them (SIG_DFL is a member of an enum)."""
    return next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)


def _raised_through(error: BaseException) -> Iterator[CodeType]:
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        trace = cause.__traceback__
        while trace is not None:
            yield trace.tb_frame.f_code
            trace = trace.tb_next
        cause = cause.__cause__
