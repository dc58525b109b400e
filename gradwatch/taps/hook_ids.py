"""Ids of their own for gradwatch's hooks, so that the script's hooks have those that they have without it.

torch numbers the hooks of all modules, tensors and optimizers by one counter, and what it saves of a module or tensor
has the numbers of its hooks in it.
"""

from __future__ import annotations

import os

from torch.utils.hooks import RemovableHandle

FIRST = 1 << 62


class _OwnIds:
    """While it is entered hooks get ids from FIRST on; blocks of several threads may overlap.

    The counter is changed with no call in between, where Python lets no other thread run. A hook that the script
    registers on another thread meanwhile gets one of these numbers, too: none is given twice.
    """

    def __init__(self) -> None:
        self._next = FIRST
        self._entered = 0
        self._theirs = 0  # the script's next number, while this is entered

    def __enter__(self) -> None:
        if not self._entered:
            self._theirs = RemovableHandle.next_id
            RemovableHandle.next_id = self._next
        self._entered += 1

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._next = RemovableHandle.next_id
            RemovableHandle.next_id = self._theirs

    def forked(self) -> None:
        """Leave, in a child, the blocks in which other threads were as it was forked: they do not run there."""
        if self._entered:
            self._entered = 1
            self.__exit__()

    def take(self, count: int = 1) -> int:
        """The first of so many of these numbers, for hooks that are put in their places without torch's calls."""
        if self._entered:
            RemovableHandle.next_id += count
            return RemovableHandle.next_id - count
        self._next += count
        return self._next - count


own_ids = _OwnIds()
"""`with own_ids:` around each registration of a hook."""
os.register_at_fork(after_in_child=own_ids.forked)
