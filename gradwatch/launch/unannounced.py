"""Models that are trained without an optimizer: found by what a backward is about to fill, for nothing announces them.

The graph of a backward is walked, which costs microseconds to milliseconds; so not of every one: of the first ones,
then of one in eight more than so far, and of the one that follows a backward which reached nothing that is watched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from gradwatch.taps.backward_entry import BackwardCall
from gradwatch.taps.graph_leaves import leaves
from gradwatch.taps.registered import Registered

SPARED = 8  # of so many backwards one is looked at, once so many have passed


class Unannounced:
    """Which models that are not watched the backwards of this process reach."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self.begin()

    def begin(self) -> None:
        """Look at the first backwards again: in a forked child."""
        self._backwards = 0
        self._next = 1
        self._fruitless = 1  # backwards that reached nothing before the next of these is looked at
        self._lost = 0

    def due(self, heard: bool) -> bool:
        """Whether the graph of the backward that is about to run should be looked at; called once for each.

        `heard`: the one before it reached something that is watched.
        """
        self._backwards += 1
        self._lost += not heard
        if self._backwards < self._next and self._lost < self._fruitless:
            return False
        if self._lost >= self._fruitless:
            self._lost, self._fruitless = 0, self._fruitless * 2
        self._next = self._backwards + max(1, self._backwards // SPARED)
        return True

    def models(self, call: BackwardCall, watched: Callable[[int], bool]) -> list[nn.Module]:
        """The models that hold parameters which this backward fills, and which are not `watched` (asked by `id`).

        None where ranks shard parameters: what their backwards fill are copies that no optimizer knows.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return []
        known = self._registered
        params = [leaf for leaf in leaves(call.roots) if not watched(id(leaf))]
        owners = known.owners(params) if params else []
        roots = [known.root(owner[0], known.clock) for owner in owners if owner is not None]
        return list({id(root): root for root in roots}.values())
