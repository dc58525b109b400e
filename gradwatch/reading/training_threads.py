"""Threads that train at the same time: which of them may look at which gradients.

torch lets no two threads use one `.grad` while either replaces or accumulates it: not even `param.grad is None` is
safe, and the process may die of it. A script that trains in several threads keeps each model to one of them at a time,
and so does whatever looks at gradients for it.
"""

from __future__ import annotations

from threading import get_ident


class TrainingThreads:
    """The threads of a script that have called `backward`."""

    __slots__ = ("first", "several")

    def __init__(self) -> None:
        self.first = 0
        self.several = False

    def began(self, thread: int) -> None:
        """A thread other than the `first` begins a backward: the first of all, or one of several for good."""
        if self.first:
            self.several = True
        else:
            self.first = thread

    def may_look(self, last: int) -> bool:
        """True if no other thread can be changing gradients which the thread `last` (0: not known) has used last."""
        return not self.several or last == get_ident()
