"""The end of a process by `os._exit`, which runs no exit handler: the journal is ended, and the account printed.

The same is done before `os.exec…` replaces the program. If that fails, the script goes on unwatched, and its account is
printed once more at its end.

Training scripts end so to get past threads that would keep Python from ending (DataLoaders, loggers). Forked children,
those of multiprocessing included, end so too: if the process itself has not trained, the call is Python's own. The exit
status, and what the script has not flushed from its streams, are as without gradwatch. The call may come at any moment:
from a signal handler in the midst of gradwatch's own code, or while another thread holds a lock. So a deadline is set
first. Other threads of the script go on until the end, usually for some hundredths of a second.
"""

from __future__ import annotations

import _thread
import functools
import os
import posix
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradwatch.launch import exit_summary
from gradwatch.taps.patch import Layer, Patch
from gradwatch.taps.process_totals import ended_by_exceptions

LONGEST = [5.0]
"""In one place: seconds after which the process ends, whatever the account waits for."""

Conclude = Callable[[bool], object]
"""Ends the watching of this process; True: none of gradwatch's code is under way on the calling thread."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BELOW_THE_SCRIPT = ("isolated_python.py", "run_script.py")
_leaving: list[int] = []  # the process in which this is under way


def listen(conclude: Conclude) -> Callable[[], None]:
    """Call `conclude` before `os._exit` or `os.exec…` ends this process or a fork of it; gives the call to stop."""
    removes = [patch.listen(conclude) for patch in (_exit_patch, _execv_patch, _execve_patch)]

    def remove() -> None:
        for each in removes:
            each()

    return remove


def _make(layer: Layer[Conclude]) -> Callable[..., Any]:
    original = layer.original

    @functools.wraps(original)
    def _exit(*args: Any, **kwargs: Any) -> Any:
        # Where another library has put there what may return, the process may go on.
        ends = original is posix._exit and _status(*args, **kwargs) is not None
        if ends and layer.listeners and exit_summary.owed() and os.getpid() not in _leaving:
            _leaving.append(os.getpid())
            _conclude(layer, functools.partial(original, *args, **kwargs))
        return original(*args, **kwargs)

    _exit.__module__ = "os"  # where pickle finds it; the original says "posix"
    return _exit


def _make_exec(layer: Layer[Conclude]) -> Callable[..., Any]:
    original = layer.original

    @functools.wraps(original)
    def execute(path: Any, *args: Any, **kwargs: Any) -> Any:
        pid = os.getpid()
        # `os.execvp` tries one folder after another.
        ends = original in (posix.execv, posix.execve) and _is_program(path)
        if not (ends and layer.listeners and exit_summary.owed() and pid not in _leaving):
            return original(path, *args, **kwargs)
        _leaving.append(pid)
        _conclude(layer, functools.partial(original, path, *args, **kwargs))
        try:
            return original(path, *args, **kwargs)
        finally:  # it has failed
            _leaving.remove(pid)
            exit_summary.goes_on()

    execute.__module__ = "os"
    return execute


_exit_patch: Patch[Conclude] = Patch(os, "_exit", _make)
_execv_patch: Patch[Conclude] = Patch(os, "execv", _make_exec)
_execve_patch: Patch[Conclude] = Patch(os, "execve", _make_exec)
"""Those two that the others of their family call."""


def _is_program(path: Any) -> bool:
    """True if this is a file that may be executed, or the number of an open one."""
    try:
        return isinstance(path, int) or (os.path.isfile(path) and os.access(path, os.X_OK))
    except (TypeError, ValueError):
        return False


def _status(*args: Any, **kwargs: Any) -> int | None:
    """The exit status, None where the call is none that `os._exit` takes."""
    values = (*args, *kwargs.values())
    if len(values) != 1 or kwargs.keys() > {"status"} or not isinstance(values[0], int):
        return None
    return values[0] if -(1 << 31) <= values[0] < 1 << 31 else None


def _conclude(layer: Layer[Conclude], end: Callable[[], object]) -> None:
    """Call the listeners; raises nothing, and ends the process where they take too long.

    From `threading` only what takes no lock of its own: a signal handler may have interrupted the code that holds it.
    """
    done = _thread.allocate_lock()
    done.acquire()
    at_rest = not _under_way()
    try:
        if at_rest:
            _thread.start_new_thread(_end_later, (done, end))
            _call(layer, True, done)
        else:  # what it has interrupted on this thread may hold locks, and never goes on
            ended_by_exceptions()
            _thread.start_new_thread(_call, (layer, False, done))
            done.acquire(timeout=LONGEST[0])
    except BaseException:  # of a signal handler, or no thread can be had: the process ends now
        return


def _call(layer: Layer[Conclude], at_rest: bool, done: _thread.LockType) -> None:
    try:
        for conclude in layer.listeners:
            conclude(at_rest)
    finally:
        done.release()


def _end_later(done: _thread.LockType, end: Callable[[], object]) -> None:
    if not done.acquire(timeout=LONGEST[0]):
        end()


def _under_way() -> bool:
    """True if code of gradwatch's is under way on this thread."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and not file.endswith(_BELOW_THE_SCRIPT):
            return True
        frame = frame.f_back
    return False
