"""Gradients that arrived since the last step, how often, and whether they are still there.

K parameters of one optimizer. What a backward left counts until it is cleared: a batch given up, or a
critic that the generator's loss went through, leaves arrivals whose gradients the next step never sees.
Nothing announces `zero_grad()`, so one gradient of the last backward is looked at when the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.layouts import local


class ArrivalCounts:
    """The arrivals at K parameters between two steps; `positions` gives the k of a slot.

    `count` backwards have ended, of which the first `cleared` no longer count. On a device only a gradient that
    is gone (`set_to_none`) is noticed: to find zeros there, the host would have to wait.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.count = 0
        self.cleared = 0
        self._params = params
        self._bulk: NDArray[np.int32] | None = None  # arrivals counted in bulk
        self._per_param = [0] * len(params)  # arrivals counted one by one
        self._zero_grad_probe: tuple[int, int, int] | None = None  # position, identity, version
        # What `add_slots` was given last, and the positions that it stands for.
        self._usual: tuple[list[int], dict[int, int], list[int]] | None = None
        self._counted: tuple[list[int], NDArray[np.int32]] | None = None
        self._by_versions: tuple[list[int], int, NDArray[np.int32]] | None = None
        # FSDP1 takes gradients away and puts them back in the midst of a backward.
        self._has_gradient = True
        for kind in set(map(type, params)):
            self._has_gradient = self._has_gradient and kind.__name__ != "FlatParameter"

    @property
    def current(self) -> int:
        """Backwards whose gradients have not been cleared since."""
        return self.count - self.cleared

    def add(self, counts: NDArray[np.int32], last: int | None = None) -> None:
        """One backward has ended: `counts[K]` arrivals, the last of them at position `last`."""
        self.count += 1
        self._bulk = counts if self._bulk is None else self._bulk + counts
        self._note(last)

    def add_slots(self, touched: Sequence[int], positions: dict[int, int]) -> bool:
        """As `add`, from a handful of slots; numpy would cost more than it saves. True if any is here."""
        usual = self._usual
        if usual is None or usual[0] != touched or usual[1] is not positions:
            here = [positions[slot] for slot in touched if slot in positions]
            self._usual = usual = list(touched), positions, here
        here, per_param = usual[2], self._per_param
        if not here:
            return False
        for k in here:
            per_param[k] += 1
        self.count += 1
        self._note(here[-1])
        return True

    def per_param(self) -> list[int]:
        """Arrivals of each of K gradients; the list itself, which the caller may correct."""
        if self._bulk is not None:
            self._per_param = (self._bulk + self._per_param).tolist()  # sync: numpy
            self._bulk = None
        return self._per_param

    def counted(self) -> NDArray[np.int32]:
        """`per_param`, as an array; the same one while nothing changes."""
        per_param = self.per_param()
        if self._counted is None or self._counted[0] != per_param:
            self._counted = per_param.copy(), np.array(per_param, np.int32)
        return self._counted[1]

    def by_versions(self, versions: list[int]) -> NDArray[np.int32]:
        """The arrivals that versions of gradients stand for (-1 = none); the same array while nothing changes."""
        known, backwards = self._by_versions, self.count - self.cleared
        if known is not None and known[0] is versions and known[1] == backwards:
            return known[2]
        here = np.array(versions) >= 0
        calls: NDArray[np.int32] = np.where(here, max(1, backwards), 0).astype(np.int32)
        self._by_versions = (versions, backwards, calls)
        return calls

    def begins(self) -> bool:
        """A backward begins: forget the ones before it if their gradients have been cleared. True if they were."""
        if self._zero_grad_probe is None or not self._gone(*self._zero_grad_probe):
            return False
        self.drop()
        return True

    def stash(self) -> None:
        """gradwatch has stashed `.grad` until this backward ends: not a `zero_grad()`."""
        self._zero_grad_probe = None

    def drop(self) -> None:
        """Discard the arrivals counted so far."""
        cleared = self.count
        self.restart()
        self.count = self.cleared = cleared

    def restart(self) -> None:
        """A new step."""
        self.count = self.cleared = 0
        self._bulk = self._zero_grad_probe = None
        self._per_param = [0] * len(self._params)

    def shift(self, backwards: int) -> None:
        """The first `backwards` of them, all cleared, belong to a step that is over."""
        self.count -= backwards
        self.cleared -= backwards

    def _note(self, k: int | None) -> None:
        """Remember one gradient that is there now; the last to arrive, which the next backward makes last."""
        grad = self._params[k].grad if k is not None and self._has_gradient else None
        if grad is None or k is None:
            self._zero_grad_probe = None
            return
        if type(grad) is not Tensor:
            grad = local(grad)
        self._zero_grad_probe = k, id(grad), grad._version

    def _gone(self, k: int, identity: int, version: int) -> bool:
        grad = self._params[k].grad
        if grad is None:
            return True
        grad = local(grad)
        written = id(grad) != identity or grad._version != version
        zeroable = written and grad.device.type == "cpu" and grad.layout is torch.strided
        return zeroable and not bool(grad.any())  # sync: CPU tensor
