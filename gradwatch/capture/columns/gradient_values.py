"""Columns of gradient values: the fraction of exact zeros, extremes, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwatch.capture.columns.pending_columns import Numbers, PendingColumns
from gradwatch.reading import foreach
from gradwatch.reading.chunks import mean_and_std, zeros, zeros_and_extremes
from gradwatch.reading.device import Number, device_mean_and_std, on_host
from gradwatch.reading.layouts import dense, flat

_EXTREMES, _MOMENTS = frozenset({"max_abs", "min", "max"}), frozenset({"mean", "std"})
GRADIENT_COLUMNS = _EXTREMES | _MOMENTS | {"zero_fraction"}


def read_gradient_values(
    pending: PendingColumns, due: Mapping[str, Sequence[int]], grads: Sequence[Tensor | None], scale: Number
) -> None:
    """Put the columns of gradients that are `due` into `pending`, by name at these positions of `grads[K]`.

    Where there is no gradient there is no value. `scale` is the loss scale still in `grads`.
    """
    numbers = {name: Numbers() for name in due}
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
        if names == ["zero_fraction"] and foreach.is_small(tensor):
            small.setdefault(tensor.dtype, {})[k] = tensor
            continue
        for name, number in zip(names, _read(tensor, names), strict=True):
            numbers[name].put(k, number)
    for group in small.values():
        for (k, tensor), nonzero in zip(
            group.items(), foreach.host_norms(list(group.values()), 0), strict=True
        ):
            numbers["zero_fraction"].put(k, (tensor.numel() - nonzero) / tensor.numel())
    for name, each in numbers.items():
        pending.present[name] = each.positions()
        pending.parts[name] = each.send(pending.count, 1.0 if name == "zero_fraction" else scale)


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
        found["zero_fraction"] = (vector.numel() - torch.count_nonzero(vector)).float() / vector.numel()
    if not _EXTREMES.isdisjoint(names):
        wide = torch.promote_types(vector.dtype, torch.float32)
        low, high = (one.to(wide) for one in torch.aminmax(vector))
        found["min"], found["max"], found["max_abs"] = low, high, torch.maximum(high, -low)
    if not _MOMENTS.isdisjoint(names):
        found["mean"], found["std"] = device_mean_and_std(vector)
    return found
