"""Threads that train at the same time: which of them may look at which gradients.

torch lets no two threads use one `.grad` while either replaces or accumulates it: not even `param.grad is None` is
safe, and the process may die of it. A script that trains in several threads keeps each model to one of them at a time,
and so does whatever looks at gradients for it.
"""

from __future__ import annotations

import sys
from threading import get_ident

_BEGAN: set[int] = set()  # threads of this process that have begun a backward while something was watched


def several_live() -> bool:
    """True if more than one thread lives that has begun a backward: another may be at work at any moment."""
    if len(_BEGAN) > 1:
        _BEGAN.intersection_update(sys._current_frames())
    return len(_BEGAN) > 1


class TrainingThreads:
    """The threads of a script that have called `backward`."""

    __slots__ = ("first", "several")

    def __init__(self) -> None:
        self.first = 0
        self.several = False

    def began(self, thread: int) -> None:
        """A thread other than the `first` begins a backward: the first of all, or one of several for good."""
        _BEGAN.add(thread)
        if self.first:
            self.several = True
        else:
            self.first = thread

    def may_look(self, last: int) -> bool:
        """True if no other thread can be changing gradients which the thread `last` (0: not known) has used last."""
        return not self.several or last == get_ident()
