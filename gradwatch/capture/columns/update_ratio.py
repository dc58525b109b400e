"""Columns of the weights: their norm, and the update ratio, by how much of it they have changed since the last step.

That change is the optimizer's, and whatever the script itself has written to the weights between the two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwatch.capture.columns.pending_columns import MovedParameters, Numbers, PendingColumns
from gradwatch.reading import chunks, foreach
from gradwatch.reading.device import AsyncCopy, Floats, on_host, widest
from gradwatch.reading.layouts import dense, flat
from gradwatch.records.snapshot import BoolArray

WEIGHT_COLUMNS = frozenset({"weight_norm", "update_ratio"})
# A weight matrix that starts at zero (LoRA B, zero-init residuals) has a huge first ratio and no problem.
WEIGHT_NORM_FLOOR = 0.1

Kind = tuple[torch.device, torch.dtype]


class PendingRatio:
    """‖Δw‖ / max(‖w‖, 0.1) of K parameters, from two norms on their way."""

    def __init__(self, change: AsyncCopy, size: AsyncCopy) -> None:
        self._change = change
        self._size = size

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        return self._change.ready() and self._size.ready()

    def size(self) -> Floats:
        """[K]: ‖w‖."""
        return self._size.values()

    def values(self) -> Floats:
        """[K]."""
        # Divided on the host: a factor sent to the device would make it wait.
        return np.divide(self._change.values(), np.maximum(self.size(), np.float32(WEIGHT_NORM_FLOOR)))


class KeptWeights(NamedTuple):
    """Copies of some weights as they were at `step`, by position; `moved` says which of them that step moves."""

    step: int
    moved: MovedParameters
    copies: dict[int, Tensor]


class WeightReader:
    """The weights of one capture, and some of them as they were one step before."""

    def __init__(self) -> None:
        self._kept: KeptWeights | None = None
        # Memory that is used again: that of a fresh copy costs the system more to find than to write.
        self._memory: dict[Kind, Tensor] = {}

    def discard(self) -> None:
        """Discard the copies: other weights come next."""
        self._kept = None

    def read(
        self,
        pending: PendingColumns,
        step: int,
        params: Sequence[Tensor],
        norms: BoolArray | None,
        ratios: BoolArray | None,
    ) -> None:
        """Put the norms and the update ratios that are due into `pending`; a ratio where the weights were kept."""
        kept, self._kept = self._kept, None
        copies: dict[int, Tensor] = {}
        if ratios is not None and kept is not None and kept.step == step - 1:
            copies = {k: copy for k, copy in kept.copies.items() if ratios[k] and _alike(params[k], copy)}
        change, before, after = Numbers(), Numbers(), Numbers()
        for k, (moved_by, was, now) in _changes(params, copies).items():
            change.put(k, moved_by)
            before.put(k, was)
            if norms is not None and norms[k]:
                after.put(k, now)
        others = [] if norms is None else [k for k in np.flatnonzero(norms).tolist() if k not in copies]
        for k, now in _norms([params[k] for k in others], others).items():
            after.put(k, now)
        if norms is not None:
            pending.parts["weight_norm"] = after.send(pending.count)
            pending.present["weight_norm"] = after.present(pending.count)
        if copies and kept is not None:
            ratio = PendingRatio(change.send(pending.count), before.send(pending.count))
            pending.parts["update_ratio"] = ratio
            pending.present["update_ratio"] = change.present(pending.count)
            pending.moved["update_ratio"] = kept.moved

    def keep(self, step: int, params: Sequence[Tensor], at: BoolArray, moved: MovedParameters) -> None:
        """Copy the weights `at` these positions, to be compared with those of the next step."""
        vectors: dict[Kind, dict[int, Tensor]] = {}
        for k in np.flatnonzero(at).tolist():
            vector = flat(dense(params[k]))
            vectors.setdefault((vector.device, vector.dtype), {})[k] = vector
        copies: dict[int, Tensor] = {}
        for kind, group in vectors.items():
            sizes = [vector.numel() for vector in group.values()]
            parts = self._memory_of(kind, sum(sizes)).split(sizes)
            with torch.no_grad():
                foreach.overwrite(parts, list(group.values()))
            copies.update(zip(group, parts, strict=True))
        self._kept = KeptWeights(step, moved, copies)

    def _memory_of(self, kind: Kind, size: int) -> Tensor:
        memory = self._memory.get(kind)
        if memory is None or memory.numel() < size:
            device, dtype = kind
            memory = self._memory[kind] = torch.empty(size, device=device, dtype=dtype)
        return memory[:size]


def _alike(param: Tensor, copy: Tensor) -> bool:
    """True if a weight still has the size, the type and the place of its copy."""
    tensor = dense(param)
    return (tensor.numel(), tensor.dtype, tensor.device) == (copy.numel(), copy.dtype, copy.device)


Three = tuple[float | Tensor, float | Tensor, float | Tensor]


def _changes(params: Sequence[Tensor], copies: dict[int, Tensor]) -> dict[int, Three]:
    """By position, the norms of the change, of the copy, and of the weight."""
    found: dict[int, Three] = {}
    on_devices = [k for k, copy in copies.items() if not on_host(copy)]
    for k, copy in copies.items():
        if on_host(copy):
            found[k] = chunks.norms_of_change(params[k], copy)
    for kind, group in _by_kind(on_devices, copies).items():
        new, old = [flat(dense(params[k])) for k in group], [copies[k] for k in group]
        wide = widest(kind[0])
        changes = foreach.norms(foreach.differences(new, old), 2, dtype=wide)
        each = changes, foreach.norms(old, 2, dtype=wide), foreach.norms(new, 2, dtype=wide)
        found.update(zip(group, zip(*each, strict=True), strict=True))
    return found


def _norms(tensors: Sequence[Tensor], positions: Sequence[int]) -> dict[int, float | Tensor]:
    """By position, the norms of weights."""
    found: dict[int, float | Tensor] = {}
    parts = {k: dense(tensor) for k, tensor in zip(positions, tensors, strict=True)}
    for k, part in parts.items():
        if on_host(part):
            found[k] = chunks.norm(part)
    for kind, group in _by_kind([k for k, part in parts.items() if not on_host(part)], parts).items():
        norms = foreach.norms([parts[k] for k in group], 2, dtype=widest(kind[0]))
        found.update(zip(group, norms, strict=True))
    return found


def _by_kind(positions: Sequence[int], tensors: dict[int, Tensor]) -> dict[Kind, list[int]]:
    """The positions of tensors of one device and dtype, which torch reads together."""
    kinds: dict[Kind, list[int]] = {}
    for k in positions:
        kinds.setdefault((tensors[k].device, tensors[k].dtype), []).append(k)
    return kinds
