"""Backwards whose gradients FSDP2 keeps unreduced until a later one of the step: `set_requires_gradient_sync(False)`.

They fill no `.grad` and call no hook of a shard, so that nothing shows that they reached what is watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from gradwatch.capture.parameter_shards import fsdp2_groups

_SWITCHES = ("reduce_grads", "all_reduce_grads")  # of torch's own classes, which may be without them one day


class UnreducedBackwards:
    """Counts the backwards that begin while FSDP2 is set not to reduce, and after which no hook has been called.

    Backwards of other models in that time, which FSDP2 has nothing to do with, are counted with them.
    """

    def __init__(self) -> None:
        self.groups: list[weakref.ref[Any]] = []  # parameters that FSDP2 reduces together
        self._count = 0
        # At the begin of the latest backward, where it is not to reduce: how many had called a hook. Else None.
        self._hooked: int | None = None

    def find(self, modules: Iterable[nn.Module]) -> None:
        """Know the parameters of these modules, too."""
        self.groups += [weakref.ref(group) for module in modules for group in fsdp2_groups(module)]

    def begins(self, hooked: int) -> None:
        """Note that a backward is about to run; `hooked` backwards before it have called a hook."""
        self._count = self.count(hooked)
        found = [group for ref in self.groups if (group := ref()) is not None]
        reduces = all(getattr(group, name, True) for group in found for name in _SWITCHES)
        self._hooked = None if reduces else hooked

    def count(self, hooked: int) -> int:
        """Number of such backwards, the latest included if none has called a hook since: `hooked` have by now."""
        return self._count + (self._hooked == hooked)
