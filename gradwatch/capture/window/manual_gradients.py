"""Gradients that are there at a step though no hook was called for them: assigned by the script, or left from before.

A norm that repeats says nothing (a sign, a normalised gradient have the same one in every step), and `id()` little: a
new tensor may lie where the freed one did. A weak reference to the storage settles it. It keeps no memory, and unlike
one to the tensor it does not stop `swap_tensors`.
"""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.gradient_writes import State
from gradwatch.reading.layouts import local
from gradwatch.runtime.interruption import not_ours


class ManualGradients:
    """Gradients of the last step that no hook was called for: storage and version, by position among K."""

    def __init__(self) -> None:
        self.seen = False  # True if any gradient was looked at in this step or the last
        self._before: dict[int, tuple[StorageWeakRef, int]] = {}
        self._now: dict[int, tuple[StorageWeakRef, int]] = {}

    def step(self) -> None:
        """Begin a step: what was looked at since the last call is the last step's."""
        self._before, self._now = self._now, {}
        self.seen = bool(self._before)

    def is_new(
        self, k: int, grad: Tensor, now: State, before: State | None, backwards: int, silenced: bool
    ) -> bool:
        """True if a gradient arrived since the last step: not the same tensor, never written to since.

        `now` and `before` are the states at the two steps; `backwards` have ended in between, for any parameter. A
        zero gradient after a backward that did not reach it is what `zero_grad(set_to_none=False)` left. `silenced`: a
        swap of the parameter's contents has disabled its hook since the last step.
        """
        ids, versions, raw = now
        norms = raw.norms() if isinstance(raw, CpuNorms) else None
        if norms is not None and norms[k] == 0 and backwards:
            return False
        storage = _storage(grad)
        if storage is not None:
            self._now[k], self.seen = (storage, versions[k]), True
        if before is None:
            return True
        last_ids, last_versions, last = before
        if versions[k] != last_versions[k]:
            return True
        if norms is not None and isinstance(last, CpuNorms) and norms[k] != last.norms()[k]:
            return True  # written through `.data`, which changes no version
        known = self._before.get(k)
        if known is None:  # a hook was called at the last step, so it was no manual gradient then
            return silenced or ids[k] != last_ids[k]
        return storage is None or storage.cdata != known[0].cdata


def _storage(grad: Tensor) -> StorageWeakRef | None:
    """A weak reference to where the numbers are; None for layouts that have no storage of their own."""
    try:
        return StorageWeakRef(local(grad).untyped_storage())
    except (NotImplementedError, RuntimeError) as error:
        if not_ours(error):
            raise
        return None
