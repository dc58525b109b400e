"""Threads that train at the same time: which of them may look at which gradients.

torch lets no two threads use one `.grad` while either replaces or accumulates it: not even `param.grad is None` is
safe, and the process may die of it. A script that trains in several threads keeps each model to one of them at a time,
and so does whatever looks at gradients for it.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from threading import get_ident
from types import FrameType

_STANDARD = os.path.dirname(os.__file__) + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"
# Threads of this process that have begun a backward while something was watched, by what Python may give to the next
# thread as well; None: one that `threading` has not started.
_BEGAN: dict[int, weakref.ref[threading.Thread] | None] = {}


def several_at_work() -> bool:
    """True if more than one thread is at work of those that have begun a backward: another may be in one any moment.

    At work is a thread that lives and is inside some code but Python's own, as an idle one of a pool is not; and not
    one that waits for the end of this thread.
    """
    if len(_BEGAN) < 2:
        return False
    frames = sys._current_frames()
    for ident in [one for one in _BEGAN if not _lives(one, frames)]:
        del _BEGAN[ident]
    return sum(ident == get_ident() or _is_at_work(frames[ident]) for ident in _BEGAN) > 1


def _note(thread: int) -> None:
    known = threading._active.get(thread)  # type: ignore[attr-defined]  # `current_thread` would make one
    _BEGAN[thread] = None if known is None else weakref.ref(known)


def _lives(ident: int, frames: dict[int, FrameType]) -> bool:
    ref = _BEGAN[ident]
    thread = None if ref is None else ref()
    return ident in frames and (ref is None or (thread is not None and thread.is_alive()))


def _is_this_thread(join: FrameType) -> bool:
    this = threading._active.get(get_ident())  # type: ignore[attr-defined]  # as in `_note`
    return join.f_locals.get("self") is this


def _is_at_work(frame: FrameType | None) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        if file == threading.__file__ and frame.f_code.co_name == "join" and _is_this_thread(frame):
            return False
        if not file.startswith((_STANDARD, "<frozen")) or _PACKAGES in file:
            return True
        frame = frame.f_back
    return False


class TrainingThreads:
    """The threads of a script that have called `backward`."""

    __slots__ = ("first", "several")

    def __init__(self) -> None:
        self.first = 0
        self.several = False

    def began(self, thread: int) -> None:
        """A thread other than the `first` begins a backward: the first of all, or one of several for good."""
        _note(thread)
        if self.first:
            self.several = True
        else:
            self.first = thread

    def may_look(self, last: int) -> bool:
        """True if no other thread can be changing gradients which the thread `last` (0: not known) has used last."""
        return not self.several or last == get_ident()
