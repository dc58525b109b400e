"""Number of times that a gradient arrived at each parameter since the last step: 0 is none, and no gradient of zeros.

K parameters of one optimizer. What a backward left counts until it is cleared: a batch given up, or a
critic that the generator's loss went through, leaves arrivals whose gradients the next step never sees.
Nothing announces `zero_grad()`, so one gradient of the last backward is looked at when the next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

    def __init__(self, params: Sequence[Tensor], positions: Mapping[int, int]) -> None:
        self.count = 0
        self.cleared = 0
        self._positions = positions
        self._touched: list[list[int]] = []  # the slots that each backward reached
        self._without_backward: set[int] = set()  # positions of gradients that no backward brought
        self._zero_grad_probe: tuple[int, int, int] | None = None  # position, identity, version
        # The slots given last, and the position of the last of them that is here; None where none is.
        self._usual: tuple[list[int], int | None] = ([], None)
        # What `counted` made last, and of what. In most loops it is the same step after step.
        self._counted: tuple[list[list[int]], NDArray[np.int32]] = ([], np.zeros(len(params), np.int32))
        self.complete = not params  # each of K gradients has arrived, as `counted` said last
        self._corrected: tuple[list[int], NDArray[np.int32]] | None = None
        self._by_versions: tuple[list[int], int, NDArray[np.int32]] | None = None
        self.hold(params)

    def hold(self, params: Sequence[Tensor]) -> None:
        """Count for these parameters from now on, at the same positions: the first, or the next ones."""
        self._params = params
        # FSDP1 takes gradients away and puts them back in the midst of a backward.
        self._has_gradient = True
        for kind in set(map(type, params)):
            self._has_gradient = self._has_gradient and kind.__name__ != "FlatParameter"

    @property
    def current(self) -> int:
        """Backwards whose gradients have not been cleared since."""
        return self.count - self.cleared

    def add(self, touched: list[int]) -> bool:
        """Add a backward that has reached these slots, of whichever capture. True if any is here.

        The list is not copied: what was given once must not change.
        """
        if not self._params:  # released: others may have its slots
            return False
        usual = self._usual
        last = usual[1] if usual[0] is touched else self._find_last(touched)
        if last is None:
            return False
        self.count += 1
        self._touched.append(touched)
        # One gradient that is there now; the last to arrive, which the next backward makes last.
        grad = self._params[last].grad if self._has_gradient else None
        if grad is not None and type(grad) is not Tensor:
            grad = local(grad)
        self._zero_grad_probe = None if grad is None else (last, id(grad), grad._version)
        return True

    def _find_last(self, touched: list[int]) -> int | None:
        positions = self._positions
        last: int | None = None
        for slot in reversed(touched):
            if slot in positions:
                last = positions[slot]
                break
        self._usual = touched, last
        return last

    def counted(self) -> NDArray[np.int32]:
        """int32[K] arrivals; the same array while nothing changes."""
        if self._counted[0] != self._touched:
            positions = self._positions
            places = [positions[slot] for slots in self._touched for slot in slots if slot in positions]
            counts = np.bincount(np.array(places, np.intp), minlength=len(self._params)).astype(np.int32)
            self._counted, self.complete = (self._touched.copy(), counts), bool(counts.all())
        return self._counted[1]

    def corrected(self, absent: Sequence[int], without_backward: Sequence[int]) -> NDArray[np.int32]:
        """`counted` without those that are `absent`, and with one of each that no hook was called for."""
        self._without_backward.update(without_backward)
        counts = self.counted().tolist()  # sync: numpy
        for k in self._without_backward:
            counts[k] = counts[k] or 1
        for k in absent:
            counts[k] = 0
        if self._corrected is None or self._corrected[0] != counts:
            self._corrected = counts, np.array(counts, np.int32)
        return self._corrected[1]

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
        """Discard, as a backward begins, the ones before it if their gradients have been cleared. True if they were."""
        if self._zero_grad_probe is None or not self._gone(*self._zero_grad_probe):
            return False
        self.drop()
        return True

    def stash(self) -> None:
        """Do not take it for `zero_grad()` that gradwatch has stashed `.grad` until this backward ends."""
        self._zero_grad_probe = None

    def drop(self) -> None:
        """Discard the arrivals counted so far."""
        cleared = self.count
        self.restart()
        self.count = self.cleared = cleared

    def restart(self) -> None:
        """Begin a new step, without arrivals."""
        self.count = self.cleared = 0
        self._zero_grad_probe = None
        self._touched = []
        if self._without_backward:
            self._without_backward = set()

    def release(self) -> None:
        """Hold none of the parameters any more: nothing will arrive before `hold`."""
        self.restart()
        self._params = []

    def shift(self, backwards: int) -> None:
        """Take off the first `backwards` of them, all cleared, which belong to a step that is over."""
        self.count -= backwards
        self.cleared -= backwards

    def _gone(self, k: int, identity: int, version: int) -> bool:
        grad = self._params[k].grad if self._params else None  # none: the optimizer has died
        if grad is None:
            return True
        grad = local(grad)
        written = id(grad) != identity or grad._version != version
        zeroable = written and grad.device.type == "cpu" and grad.layout is torch.strided
        return zeroable and not bool(grad.any())  # sync: CPU tensor
