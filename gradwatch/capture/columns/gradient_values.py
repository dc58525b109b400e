"""Columns of gradient values: the fraction of exact zeros, extremes, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwatch.capture.columns.pending_columns import Numbers, PendingColumns
from gradwatch.reading import foreach
from gradwatch.reading.chunks import mean_and_std, zeros, zeros_and_extremes
from gradwatch.reading.device import Number, on_host
from gradwatch.reading.layouts import dense, flat

_EXTREMES, _MOMENTS = frozenset({"max_abs", "min", "max"}), frozenset({"mean", "std"})
GRADIENT_COLUMNS = _EXTREMES | _MOMENTS | {"zero_fraction"}


def read_gradient_values(
    pending: PendingColumns, due: Mapping[str, Sequence[int]], grads: Sequence[Tensor | None], scale: Number
) -> None:
    """Put the columns of gradients that are `due` into `pending`, each where it is due and there is a gradient.

    `scale` is the loss scale still in `grads`. One pass over a gradient on the CPU gives all that is asked of it.
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
        pending.present[name] = each.present(pending.count)
        pending.parts[name] = each.send(pending.count, 1.0 if name == "zero_fraction" else scale)


def _read(tensor: Tensor, names: Sequence[str]) -> Sequence[float | Tensor]:
    if not on_host(tensor):
        vector = flat(tensor)
        return [_on_device(name, vector) for name in names]
    found: dict[str, float] = {}
    if not _EXTREMES.isdisjoint(names):
        count, found["min"], found["max"] = zeros_and_extremes(tensor)
        found["zero_fraction"], found["max_abs"] = count / tensor.numel(), max(found["max"], -found["min"])
    elif "zero_fraction" in names:
        found["zero_fraction"] = zeros(tensor) / tensor.numel()
    if not _MOMENTS.isdisjoint(names):
        found["mean"], found["std"] = mean_and_std(tensor)
    return [found[name] for name in names]


def _on_device(name: str, vector: Tensor) -> Tensor:
    wide = torch.promote_types(vector.dtype, torch.float32)
    if name == "zero_fraction":
        return (vector.numel() - torch.count_nonzero(vector)).float() / vector.numel()
    found: Tensor
    if name == "mean":
        found = vector.mean(dtype=wide)
    elif name == "std":
        found = vector.to(wide).std(correction=0)
    elif name == "max_abs":
        found = torch.linalg.vector_norm(vector, float("inf")).to(wide)
    else:
        found = (vector.amin() if name == "min" else vector.amax()).to(wide)
    return found
