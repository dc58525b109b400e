"""Columns of gradient values: the fraction of exact zeros, extremes, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gradwatch.capture.columns.pending_columns import Numbers, PendingColumns, PendingValues
from gradwatch.reading import foreach_functions
from gradwatch.reading.async_copy import Floats, Number, on_host
from gradwatch.reading.chunked_statistics import mean_and_std, zeros, zeros_and_extremes
from gradwatch.reading.foreach_norms import device_mean_and_std
from gradwatch.reading.layouts import dense, flat

_EXTREMES, _MOMENTS = frozenset({"max_abs", "min", "max"}), frozenset({"mean", "std"})
GRADIENT_COLUMNS = _EXTREMES | _MOMENTS | {"zero_fraction"}


def read_gradient_values(
    pending: PendingColumns, due: Mapping[str, Sequence[int]], grads: Sequence[Tensor | None], scale: Number
) -> None:
    """Put the columns of gradients that are `due` into `pending`, by name at these positions of `grads[K]`.

    Where there is no gradient there is no value. `scale` is the loss scale still in `grads`.
    """
    numbers, counted = {name: Numbers() for name in due}, dict[int, int]()
    wanted: dict[int, list[str]] = {}
    for name, positions in due.items():
        for k in positions:
            wanted.setdefault(k, []).append(name)
    small: dict[torch.dtype, dict[int, Tensor]] = {}
    for k, names in wanted.items():
        grad = grads[k]
        tensor = None if grad is None else dense(grad)
        if tensor is None or not tensor.numel():  # a shard may be empty though the gradient is not
            continue
        if names == ["zero_fraction"] and foreach_functions.is_small(tensor):
            small.setdefault(tensor.dtype, {})[k] = tensor
            continue
        if "zero_fraction" in names and not on_host(tensor):
            counted[k] = tensor.numel()
        for name, number in zip(names, _read(tensor, names), strict=True):
            numbers[name].put(k, number)
    for group in small.values():
        for (k, tensor), nonzero in zip(
            group.items(), foreach_functions.host_norms(list(group.values()), 0), strict=True
        ):
            numbers["zero_fraction"].put(k, (tensor.numel() - nonzero) / tensor.numel())
    for name, each in numbers.items():
        pending.present[name] = each.positions()
        if name != "zero_fraction":
            pending.parts[name] = each.send(pending, scale)
        else:
            sent = each.send(pending)
            pending.parts[name] = ZeroFractions(sent, counted) if counted else sent


class ZeroFractions:
    """[K] fractions of zeros, of which those of devices are on their way as counts: of what is not zero, of `sizes`."""

    def __init__(self, sent: PendingValues, sizes: Mapping[int, int]) -> None:
        self._sent = sent
        self._sizes = sizes

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        return self._sent.ready()

    def values(self) -> Floats:
        """[K]; waits for them."""
        found, at = np.array(self._sent.values(), np.float64), list(self._sizes)
        sizes = np.array(list(self._sizes.values()), np.float64)
        found[at] = (sizes - found[at]) / sizes
        return found.astype(np.float32)


def _read(tensor: Tensor, names: Sequence[str]) -> Sequence[float | Tensor]:
    """The columns `names` of one gradient with at least one element."""
    found = _on_host(tensor, names) if on_host(tensor) else _on_device(flat(tensor), names)
    return [found[name] for name in names]


def _on_host(tensor: Tensor, names: Sequence[str]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    if not _EXTREMES.isdisjoint(names):
        count, found["min"], found["max"] = zeros_and_extremes(tensor)
        found["zero_fraction"], found["max_abs"] = count / tensor.numel(), max(found["max"], -found["min"])
    elif "zero_fraction" in names:
        found["zero_fraction"] = zeros(tensor) / tensor.numel()
    if not _MOMENTS.isdisjoint(names):
        found["mean"], found["std"] = mean_and_std(tensor)
    return found


def _on_device(vector: Tensor, names: Sequence[str]) -> Mapping[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "zero_fraction" in names:
        found["zero_fraction"] = torch.count_nonzero(vector)  # one launch; what is left to do, the host does
    if not _EXTREMES.isdisjoint(names):
        wide = torch.promote_types(vector.dtype, torch.float32)
        low, high = (one.to(wide) for one in torch.aminmax(vector))
        found["min"], found["max"], found["max_abs"] = low, high, torch.maximum(high, -low)
    if not _MOMENTS.isdisjoint(names):
        found["mean"], found["std"] = device_mean_and_std(vector)
    return found
