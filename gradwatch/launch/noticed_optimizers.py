"""The optimizers of a process that trains, from their making until a session watches them."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from gradwatch.launch.model_discovery import trains
from gradwatch.taps.clip_functions import Clip
from gradwatch.taps.module_registry import ModuleRegistry
from gradwatch.taps.optimizers.param_groups import params_of

_MANY = 64  # known optimizers before those that are gone are looked for


class NoticedOptimizers:
    """Optimizers by their `id()`, held weakly: those that were made and wait, copies, and those looked at before.

    `waiting` has, for each, the registrations in modules before it was made.
    """

    def __init__(self, registered: ModuleRegistry) -> None:
        self.waiting: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self.copies: dict[int, weakref.ref[Optimizer]] = {}  # not met yet: many a copy never trains
        self._registered = registered
        self._seen: dict[int, weakref.ref[Optimizer]] = {}
        self._prune_at = _MANY

    def made(self, optimizer: Optimizer) -> None:
        """One is being made: it is looked at before its first gradient."""
        self.waiting[id(optimizer)] = weakref.ref(optimizer), self._registered.clock

    def filled(self, optimizer: Optimizer | None) -> None:
        """A copy is being made, or one unpickled, if it is not known: met at its first clip or step."""
        if optimizer is None or self.knows(optimizer) or id(optimizer) in self.waiting:
            return
        self.copies[id(optimizer)] = weakref.ref(optimizer)

    def copy_of(self, clip: Clip) -> Optimizer | None:
        """A copy that was not met yet, if gradients of its parameters are about to be clipped."""
        clipped, found = set(map(id, clip.params or ())), None
        for key, ref in list(self.copies.items()):
            optimizer = ref()
            if optimizer is None or self.knows(optimizer):
                self.copies.pop(key, None)
            elif not clipped.isdisjoint(map(id, params_of(optimizer))):
                found = optimizer
        return found

    def ready(self, stepping: Optimizer | None) -> list[tuple[Optimizer, int]]:
        """Optimizers that train something and were not looked at yet, with the registrations before each.

        `stepping`, which is about to take a step, is one of them whether or not its making was seen. They are known
        from then on.
        """
        ready = []
        for key, (ref, made) in list(self.waiting.items()):
            optimizer = ref()
            if optimizer is None:
                del self.waiting[key]
            elif trains(optimizer):
                del self.waiting[key]
                ready.append((optimizer, made))
        if stepping is not None and trains(stepping) and not any(one is stepping for one, _ in ready):
            ready.append((stepping, self._registered.clock))
        for optimizer, _ in ready:
            self._seen[id(optimizer)] = weakref.ref(optimizer)
        if len(self._seen) > self._prune_at:
            self._seen = {key: ref for key, ref in self._seen.items() if ref() is not None}
            self._prune_at = max(_MANY, 2 * len(self._seen))
        return ready

    def knows(self, optimizer: Optimizer) -> bool:
        """True if it has been looked at."""
        ref = self._seen.get(id(optimizer))
        return ref is not None and ref() is optimizer

    def all_wait(self) -> None:
        """Have all that are known looked at again, as in a forked child."""
        now = self._registered.clock
        for key, ref in self._seen.items():
            self.waiting.setdefault(key, (ref, now))
        self._seen.clear()
