"""Models and tensors trained without an optimizer, found by the leaves that a backward is about to fill.

No event of torch announces them. To walk the graph of a backward costs microseconds to milliseconds, so not every one
is walked: the first ones, then one in eight more than so far, the one after a backward that reached nothing that is
watched, and the first after modules were made; of the last two the fewer, the more often nothing was found. Tensors
that no module holds are looked for in processes that make no optimizer (`tensors_without_module`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gradwatch.launch.model_discovery import Found
from gradwatch.launch.tensors_without_module import TensorsWithoutModule
from gradwatch.taps import module_tree
from gradwatch.taps.backward_entry import BackwardCall
from gradwatch.taps.graph.leaves import leaves
from gradwatch.taps.module_registry import ModuleRegistry
from gradwatch.taps.process_totals import TOTALS

SPARED = 8  # of so many backwards one is looked at, once so many have passed


class _Patience:
    """Backoff of a search over many occasions: after `n` searches in vain only every 2ⁿ-th occasion is used."""

    def __init__(self) -> None:
        self._every = 1
        self._passed = 0

    def due(self, occasion: bool) -> bool:
        """True if the search is due on this occasion."""
        self._passed += occasion
        return occasion and self._passed >= self._every

    def looked(self, found: bool) -> None:
        """Note that a search was made, and if it `found` anything."""
        self._every = 1 if found else 2 * self._every
        self._passed = 0


class ModelsWithoutOptimizer:
    """Search for models that backwards of this process reach and that are not watched, and for tensors in no module."""

    def __init__(self, registered: ModuleRegistry) -> None:
        self._registered = registered
        self._tensors = TensorsWithoutModule()
        self.begin()

    def begin(self) -> None:
        """Look at the first backwards again: the process is a forked child."""
        self._backwards = 0
        self._next = 1
        self._made = -1  # modules when a backward was looked at
        self._lost, self._built = _Patience(), _Patience()
        self._asked: tuple[_Patience, ...] = ()  # whose occasion the present look is
        self._tensors.reset()

    def due(self, reached: bool) -> bool:
        """True if the graph of the backward that is about to run is to be looked at; to be called once for each.

        `reached`: the backward before it reached something that is watched.
        """
        self._backwards += 1
        lost, built = self._lost.due(not reached), self._built.due(self._made != self._registered.made)
        if self._backwards < self._next and not (lost or built):
            return False
        self._made = self._registered.made
        self._asked = (*([self._lost] if lost else []), *([self._built] if built else []))
        self._next = self._backwards + max(1, self._backwards // SPARED)
        return True

    def found(
        self, call: BackwardCall, watched: Callable[[int], bool], without_optimizer: Callable[[int], bool]
    ) -> Found:
        """Parameters that this backward fills and that are not watched: models that hold them, else the tensors.

        `watched(id)` is True for a parameter that is watched, `without_optimizer(id)` for one that is known to be
        trained without an optimizer. Models of FSDP are left out: what a backward fills there are copies of shards,
        which no optimizer has.
        """
        known, reached = self._registered, leaves(call.roots)
        params = [leaf for leaf in reached if not watched(id(leaf))]
        owners = known.owners(params) if params else []
        roots = {
            id(root): root for root in (known.root(one[0], known.clock) for one in owners if one is not None)
        }
        found = [root for root in roots.values() if not _sharded(root)]
        loose: list[tuple[str, nn.Parameter]] = []
        if (
            not TOTALS.optimizers
            and not roots
            and all(without_optimizer(id(leaf)) for leaf in reached if watched(id(leaf)))
        ):
            loose = self._tensors.moved(params)
        else:
            self._tensors.reset()
        for patience in self._asked:
            patience.looked(bool(found or loose))
        return Found(found, loose)


def _sharded(root: nn.Module) -> bool:
    """True if a part of this model is FSDP's: the wrapper of FSDP1, or a class that FSDP2 has made of the module's."""
    names = (type(module).__name__ for module in module_tree.modules(root))
    return any(name.startswith(("FSDP", "FullyShardedDataParallel")) for name in names)
