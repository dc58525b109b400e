"""Locks that outlive a fork: the thread that held one in the parent is not in the child to release it."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """A reentrant lock, `with lock.held:`, that no thread holds at the beginning of a forked child.

    Reentrant, since a signal handler may ask for what the code that it interrupted is doing.
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held = threading.RLock()
        _LOCKS.add(self)


_LOCKS: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_LOCKS):
        lock.held = threading.RLock()


os.register_at_fork(after_in_child=_renew)
