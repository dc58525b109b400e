"""Columns of gradient values: the fraction of exact zeros and the largest magnitude."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwatch.capture.columns.pending_columns import Numbers, PendingColumns
from gradwatch.reading.chunks import zeros, zeros_and_largest
from gradwatch.reading.device import Number, on_host
from gradwatch.reading.layouts import dense, flat

GRADIENT_COLUMNS = frozenset({"zero_fraction", "max_abs"})


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
    for k, names in wanted.items():
        grad = grads[k]
        tensor = None if grad is None else dense(grad)
        if tensor is not None and tensor.numel():  # a shard may be empty though the gradient is not
            for name, number in zip(names, _read(tensor, names), strict=True):
                numbers[name].put(k, number)
    for name, each in numbers.items():
        pending.present[name] = each.present(pending.count)
        pending.parts[name] = each.send(pending.count, scale if name == "max_abs" else 1.0)


def _read(tensor: Tensor, names: Sequence[str]) -> Sequence[float | Tensor]:
    if not on_host(tensor):
        vector = flat(tensor)
        return [_on_device(name, vector) for name in names]
    if "max_abs" not in names:
        return [zeros(tensor) / tensor.numel()]
    count, largest = zeros_and_largest(tensor)
    return [largest if name == "max_abs" else count / tensor.numel() for name in names]


def _on_device(name: str, vector: Tensor) -> Tensor:
    if name == "zero_fraction":
        return (vector.numel() - torch.count_nonzero(vector)).float() / vector.numel()
    wide = torch.promote_types(vector.dtype, torch.float32)
    largest: Tensor = torch.linalg.vector_norm(vector, float("inf")).to(wide)
    return largest
