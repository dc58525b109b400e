"""Numbers of their own for gradwatch's hooks, so that the script's hooks have those that they have without it.

torch numbers the hooks of all modules, tensors and optimizers by one counter, and what it saves of a module or tensor
has the numbers of its hooks in it.
"""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle

FIRST = 1 << 62


class _OwnNumbers:
    """While it is entered hooks get numbers from FIRST on.

    One that another thread registers meanwhile gets such a number, too, or leaves it with one of the script's: no
    number is given twice.
    """

    def __init__(self) -> None:
        self._next = FIRST
        self._theirs: list[int] = []

    def __enter__(self) -> None:
        self._theirs.append(RemovableHandle.next_id)
        if RemovableHandle.next_id < FIRST:
            RemovableHandle.next_id = self._next

    def __exit__(self, *_: object) -> None:
        theirs, now = self._theirs.pop(), RemovableHandle.next_id
        self._next = max(self._next, now)
        if theirs < FIRST:
            RemovableHandle.next_id = theirs if now >= FIRST else max(theirs, now)

    def take(self, count: int = 1) -> int:
        """The first of so many of these numbers, for hooks that are put in their places without torch's calls."""
        now = RemovableHandle.next_id
        if now >= FIRST:
            RemovableHandle.next_id = now + count
            return now
        self._next += count
        return self._next - count


own_numbers = _OwnNumbers()
"""`with own_numbers:` around each registration of a hook."""
