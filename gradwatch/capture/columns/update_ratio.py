"""Columns of the weights: their norm, and the update ratio, by how much of it they have changed since the last step.

That change is the optimizer's, and whatever the script itself has written to the weights between the two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gradwatch.capture.columns.pending_columns import MovedParameters, Numbers, PendingColumns, PendingValues
from gradwatch.engine.columns_needed import OF_UPDATES
from gradwatch.reading import chunked_statistics, foreach_functions
from gradwatch.reading.async_copy import Floats, on_host
from gradwatch.reading.foreach_norms import device_mean_and_std, widest
from gradwatch.reading.layouts import dense, flat

WEIGHT_MOMENTS = frozenset({"weight_mean", "weight_std"})
WEIGHT_COLUMNS = frozenset({"weight_norm"}) | WEIGHT_MOMENTS | OF_UPDATES
# A weight matrix that starts at zero (LoRA B, zero-init residuals) has a huge first ratio and no problem.
WEIGHT_NORM_FLOOR = 0.1

SMALL = 1 << 16
"""Elements of copies whose memory is kept for good: to get it anew costs more than it is."""

Kind = tuple[torch.device, torch.dtype]


class PendingRatio:
    """‖Δw‖ / max(‖w‖, 0.1) of K parameters, from two norms on their way."""

    def __init__(self, change: PendingValues, size: PendingValues) -> None:
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
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite norm says so itself
            return np.divide(self._change.values(), np.maximum(self.size(), np.float32(WEIGHT_NORM_FLOOR)))


class KeptWeights(NamedTuple):
    """Copies of some weights as they were at `step`, by position; `moved` says which of them that step moves.

    A copy is of the elements as they lay in memory, by the `strides` of then.
    """

    step: int
    moved: MovedParameters
    copies: dict[int, Tensor]
    strides: dict[int, tuple[int, ...]]


class WeightReader:
    """The weights of one capture, and some of them as they were one step before.

    The copies of a step are written over those of the step before: there is one buffer a device and dtype, as large as
    the copies of one step have been.
    """

    def __init__(self) -> None:
        self._kept: KeptWeights | None = None
        self._memory: dict[Kind, Tensor] = {}

    def discard(self) -> None:
        """Discard the copies, and their memory where it is not small: other weights come next, or none for a while."""
        self._kept = None
        if self._memory and sum(map(Tensor.numel, self._memory.values())) > SMALL:
            self._memory.clear()

    def copied(self, step: int) -> Collection[int]:
        """The positions of the weights that were copied at this step."""
        return self._kept.copies.keys() if self._kept is not None and self._kept.step == step else ()

    def read(
        self,
        pending: PendingColumns,
        step: int,
        params: Sequence[Tensor],
        due: Mapping[str, Sequence[int]],
    ) -> None:
        """Put the columns `due` into `pending`, by name at these positions of `params[K]`.

        An update only where the weight was copied at the step before.
        """
        norms = due.get("weight_norm", ())
        updates = {name: at for name, at in due.items() if name in OF_UPDATES}
        _read_moments(pending, params, {name: at for name, at in due.items() if name in WEIGHT_MOMENTS})
        kept, self._kept = self._kept, None
        copies: dict[int, Tensor] = {}
        if kept is not None and kept.step == step - 1:
            here = {k: kept.copies[k] for at in updates.values() for k in at if k in kept.copies}
            copies = {k: copy for k, copy in here.items() if _alike(params[k], copy, kept.strides[k])}
        change, before, after = Numbers(), Numbers(), Numbers()
        asked = set(norms)
        for k, (moved_by, was, now) in _changes(params, copies).items():
            change.put(k, moved_by)
            before.put(k, was)
            if k in asked:
                after.put(k, now)
        others = [k for k in norms if k not in copies]
        for k, now in norms_by_position([params[k] for k in others], others).items():
            after.put(k, now)
        if norms:
            pending.parts["weight_norm"] = after.send(pending)
            pending.present["weight_norm"] = after.positions()
        if copies and kept is not None:
            changed = change.send(pending)
            ratio = PendingRatio(changed, before.send(pending))
            for name, at in updates.items():
                pending.parts[name] = ratio if name == "update_ratio" else changed
                pending.present[name] = [k for k in at if k in copies]
                pending.moved[name] = kept.moved

    def keep(self, step: int, params: Sequence[Tensor], at: Sequence[int], moved: MovedParameters) -> None:
        """Copy the weights `at` these positions of `params[K]`, to be compared with those of the next step."""
        kinds: dict[Kind, dict[int, Tensor]] = {}
        for k in at:
            tensor = _local(params[k])
            kinds.setdefault((tensor.device, tensor.dtype), {})[k] = tensor
        copies: dict[int, Tensor] = {}
        strides: dict[int, tuple[int, ...]] = {}
        for kind, group in kinds.items():
            strides.update((k, tensor.stride()) for k, tensor in group.items())
            sizes = [tensor.numel() for tensor in group.values()]
            parts = self._memory_of(kind, sum(sizes)).split(sizes)
            together: list[tuple[Tensor, Tensor]] = []
            for tensor, part in zip(group.values(), parts, strict=True):
                if kind[0].type != "cpu" or foreach_functions.is_small(part):
                    together.append((part, _vector(tensor)))
                else:
                    chunked_statistics.copy(tensor, part)
            if together:
                foreach_functions.overwrite(*map(list, zip(*together, strict=True)))
            copies.update(zip(group, parts, strict=True))
        self._kept = KeptWeights(step, moved, copies, strides)

    def _memory_of(self, kind: Kind, size: int) -> Tensor:
        memory = self._memory.get(kind)
        if memory is None or memory.numel() < size:
            device, dtype = kind
            memory = self._memory[kind] = torch.empty(size, device=device, dtype=dtype)
        return memory[:size]


def _local(param: Tensor) -> Tensor:
    """This rank's part of a parameter, dense and real."""
    plain = type(param) is Parameter and param.layout is torch.strided and not param.is_complex()
    return param.detach() if plain else dense(param)


def _vector(param: Tensor) -> Tensor:
    """The elements of this rank's part of a parameter as they lie in memory."""
    tensor = _local(param)
    return tensor.view(-1) if tensor.is_contiguous() else flat(tensor)


def _alike(param: Tensor, copy: Tensor, strides: tuple[int, ...]) -> bool:
    """True if a weight still has the size, the type and the place of its copy, and lies in memory as it did."""
    tensor = _local(param)
    same = (tensor.numel(), tensor.dtype, tensor.device) == (copy.numel(), copy.dtype, copy.device)
    return same and tensor.stride() == strides


def _read_moments(
    pending: PendingColumns, params: Sequence[Tensor], due: Mapping[str, Sequence[int]]
) -> None:
    numbers = {name: Numbers() for name in due}
    wanted: dict[int, list[str]] = {}
    for name, at in due.items():
        for k in at:
            wanted.setdefault(k, []).append(name)
    for k, names in wanted.items():
        tensor = _local(params[k])
        if tensor.numel():
            mean, std = (
                chunked_statistics.mean_and_std(tensor)
                if on_host(tensor)
                else device_mean_and_std(flat(tensor))
            )
            for name in names:
                numbers[name].put(k, mean if name == "weight_mean" else std)
    for name, each in numbers.items():
        pending.parts[name] = each.send(pending)
        pending.present[name] = each.positions()


Three = tuple[float | Tensor, float | Tensor, float | Tensor]


def _changes(params: Sequence[Tensor], copies: dict[int, Tensor]) -> dict[int, Three]:
    """Norms of the change, of the copy and of the weight, by position."""
    found: dict[int, Three] = {}
    together = [k for k, copy in copies.items() if not on_host(copy) or foreach_functions.is_small(copy)]
    for k in copies.keys() - set(together):
        found[k] = chunked_statistics.norms_of_change(_local(params[k]), copies[k])
    for kind, group in _by_kind(together, copies).items():
        new, old = [_vector(params[k]) for k in group], [copies[k] for k in group]
        tensors = [*foreach_functions.differences(new, old), *old, *new]
        numbers = _norms_of(kind, tensors)
        size = len(group)
        each = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
        found.update(zip(group, zip(*each, strict=True), strict=True))
    return found


def norms_by_position(tensors: Sequence[Tensor], positions: Sequence[int]) -> dict[int, float | Tensor]:
    """Norms of tensors, by position; small ones of a kind are read together."""
    found: dict[int, float | Tensor] = {}
    parts = {k: dense(tensor) for k, tensor in zip(positions, tensors, strict=True)}
    together = [k for k, part in parts.items() if not on_host(part) or foreach_functions.is_small(part)]
    for k in parts.keys() - set(together):
        found[k] = chunked_statistics.norm(parts[k])
    for kind, group in _by_kind(together, parts).items():
        found.update(zip(group, _norms_of(kind, [parts[k] for k in group]), strict=True))
    return found


def _norms_of(kind: Kind, tensors: Sequence[Tensor]) -> Sequence[float | Tensor]:
    """The norms of tensors of one kind: numbers of the CPU's, 0-dim tensors of a device's."""
    if kind[0].type == "cpu":
        return foreach_functions.host_norms(tensors, 2)
    return foreach_functions.norms(tensors, 2, dtype=widest(kind[0]))


def _by_kind(positions: Sequence[int], tensors: dict[int, Tensor]) -> dict[Kind, list[int]]:
    """The positions of tensors of one device and dtype, which torch reads together."""
    kinds: dict[Kind, list[int]] = {}
    for k in positions:
        kinds.setdefault((tensors[k].device, tensors[k].dtype), []).append(k)
    return kinds
