"""Buffers as they were before a forward: copies of those that forwards change, nothing for the rest."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn

from gradwatch.taps.module_tree import WITH_RUNNING_STATISTICS

LEARNING = 3  # first calls, in which every small buffer is copied
SMALL = 1 << 16  # elements


class Buffers:
    """Buffers of a model that its forwards change, found by identity and version.

    A buffer that changes for the first time after the first calls, or a large one in its first call, is not
    held as it was: `held` then gives it as it is, which is what it has been at every step but that one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}" if prefix else name, weakref.ref(module), name)
            for prefix, module in model.named_modules()
            if not isinstance(
                module, WITH_RUNNING_STATISTICS
            )  # written in training, read in evaluation: no forward hangs on them
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._calls = 0
        self._changing: set[str] = set()
        self._seen: dict[str, tuple[int, int]] = {}

    def held(self, first: bool) -> dict[str, Tensor]:
        """Copies of what the coming forward may change; only for the first call of a step, the rest follow."""
        if not first:
            return {}
        learning = self._calls < LEARNING
        self._calls += 1
        found: dict[str, Tensor] = {}
        for full, buffer in self._present():
            if full in self._changing or (learning and buffer.numel() <= SMALL):
                found[full] = buffer.detach().clone()
            if learning:
                self._seen[full] = (id(buffer), buffer._version)
        return found

    def learn(self) -> None:
        """Look at what the forward that has just ended did to them."""
        if not self._seen:
            return
        for full, buffer in self._present():
            if self._seen.get(full) != (id(buffer), buffer._version):
                self._changing.add(full)
        self._seen.clear()

    def _present(self) -> Iterator[tuple[str, Tensor]]:
        # Modules are held weakly: a watch must not keep a model alive.
        for full, ref, name in self._places:
            module = ref()
            buffer = None if module is None else module._buffers.get(name)
            if buffer is not None:
                yield full, buffer
