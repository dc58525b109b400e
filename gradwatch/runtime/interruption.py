"""Tells an exception that the script sent into code of gradwatch from a fault of gradwatch's.

Python runs a signal handler between any two bytecodes of the main thread. While C++ runs a backward, the next
bytecode is that of a gradwatch hook, so a `TimeoutError` or `Preempted` that the script raises from its handler
arrives inside our guards: what is swallowed there never stops the script. The same holds for an exception that
another thread of the script sends with `PyThreadState_SetAsyncExc` (a timeout, a notebook's interrupt).

A trace or profile function of the script's (`sys.settrace`: debuggers, deadlines) runs between any two lines, too.

An exception sent so has a traceback that ends at an instruction which raises nothing. It is recognised where its class
is none of those that such an instruction may raise by itself: those of Python and its standard library, of torch, of
gradwatch, and of the compiled libraries that gradwatch calls. So a `TimeoutError` of Python's that another thread
sends is taken for a fault: counted, and not raised again.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

_RAISES = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap}
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_EVENTS = ("call", "line", "return", "exception", "opcode", "c_call", "c_return", "c_exception")
_MAY_RAISE = {
    "builtins",
    "torch",
    "gradwatch",
    "numpy",
    "safetensors",
    "safetensors_rust",
    "pydantic_core",
    "yaml",
}


def not_ours(error: BaseException) -> bool:
    """True if an exception that arrived in code of gradwatch is the script's: sent by it, or of code that it had run.

    That is of a signal handler, or of a trace function.
    """
    return sent(error) or by_trace_function(error) or by_signal_handler(error)


def as_sent(error: BaseException) -> BaseException:
    """The exception that the script has sent into an import, which Python up to 3.11 wraps where a class is made."""
    wrapped = type(error) is RuntimeError and str(error).startswith("Error calling __set_name__")
    return error.__cause__ if wrapped and error.__cause__ is not None else error


def sent(error: BaseException) -> bool:
    """True if another thread sent `error` (`PyThreadState_SetAsyncExc`): nothing raised it where it was raised."""
    package = type(error).__module__.partition(".")[0]
    if package in _MAY_RAISE or (package in sys.stdlib_module_names and package != "__main__"):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_lasti < 0:
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] not in _RAISES


def by_signal_handler(error: BaseException) -> bool:
    """True if a Python signal handler that is installed now was running when `error` was raised.

    Read off the traceback of `error` and of what it was raised from; a handler that has no Python code of its own
    (a C function) is not recognised.
    """
    # First, for handlers take a tenth of a millisecond to list: none is among what raised an error of ours.
    foreign = {one.f_code for one in _raised_through(error) if not _is_own(one)}
    return bool(foreign) and not foreign.isdisjoint(_handlers())


def by_trace_function(error: BaseException) -> bool:
    """True if a trace or profile function in Python was running when `error` was raised.

    It is known by what it was called with, for it may have uninstalled itself: a frame, and the name of an event.
    """
    return any(_traces(one) for one in _raised_through(error) if not _is_own(one))


def _traces(frame: FrameType) -> bool:
    given = [frame.f_locals.get(name) for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
    return any(
        isinstance(one, FrameType) and isinstance(event, str) and event in _EVENTS
        for one, event in pairwise(given)
    )


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


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


def _raised_through(error: BaseException) -> Iterator[FrameType]:
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        trace = cause.__traceback__
        while trace is not None:
            yield trace.tb_frame
            trace = trace.tb_next
        cause = cause.__cause__
