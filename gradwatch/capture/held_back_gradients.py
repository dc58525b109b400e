"""Backwards whose gradients FSDP2 keeps to itself until a later one of the step: `set_requires_gradient_sync(False)`.

They fill no `.grad` and call no hook of a shard, so that nothing shows that they reached what is watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from gradwatch.capture.shards import fsdp2_groups


class HeldBackGradients:
    """Counts the backwards that begin while FSDP2 is told not to reduce, and after which no hook has been called."""

    def __init__(self) -> None:
        self.groups: list[weakref.ref[Any]] = []  # parameters that FSDP2 reduces together
        self._count = 0
        self._begun: int | None = None  # backwards with hooks before one that is held back; None = it is not

    def find(self, modules: Iterable[nn.Module]) -> None:
        """Know the parameters of these modules, too."""
        self.groups += [weakref.ref(group) for module in modules for group in fsdp2_groups(module)]

    def begins(self, begun: int) -> None:
        """A backward is about to run; of those before it `begun` have called a hook."""
        self._count = self.count(begun)
        found = [group for ref in self.groups if (group := ref()) is not None]
        held_back = any(not (group.reduce_grads and group.all_reduce_grads) for group in found)
        self._begun = begun if held_back else None

    def count(self, begun: int) -> int:
        """Number of such backwards, the latest included; `begun` as in `begins`."""
        return self._count + (self._begun == begun)
