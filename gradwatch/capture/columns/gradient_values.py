"""Columns of gradient values: the fraction of exact zeros and the largest magnitude."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gradwatch.capture.columns.pending_columns import Numbers, PendingColumns
from gradwatch.reading.chunks import zeros_and_largest
from gradwatch.reading.device import Number, on_host
from gradwatch.reading.layouts import dense, flat
from gradwatch.records.snapshot import BoolArray

GRADIENT_COLUMNS = frozenset({"zero_fraction", "max_abs"})


def read_gradient_values(
    pending: PendingColumns, due: Mapping[str, BoolArray], grads: Sequence[Tensor | None], scale: Number
) -> None:
    """Put the columns of gradients that are `due` into `pending`, each where it is due and there is a gradient.

    `scale` is the loss scale still in `grads`. One pass over a gradient on the CPU gives all that is asked of it.
    """
    numbers = {name: Numbers() for name in due}
    for k in np.flatnonzero(np.logical_or.reduce(list(due.values()))).tolist():
        grad = grads[k]
        tensor = None if grad is None else dense(grad)
        if tensor is None or not tensor.numel():  # a shard may be empty though the gradient is not
            continue
        found = _read(tensor, [name for name in due if due[name][k]])
        for name, number in found.items():
            numbers[name].put(k, number)
    for name, each in numbers.items():
        pending.present[name] = each.present(pending.count)
        pending.parts[name] = each.send(pending.count, scale if name == "max_abs" else 1.0)


def _read(tensor: Tensor, names: Iterable[str]) -> dict[str, float | Tensor]:
    if on_host(tensor):
        zeros, largest = zeros_and_largest(tensor)
        both: dict[str, float | Tensor] = {"zero_fraction": zeros / tensor.numel(), "max_abs": largest}
        return {name: both[name] for name in names}
    vector = flat(tensor)
    return {name: _on_device(name, vector) for name in names}


def _on_device(name: str, vector: Tensor) -> Tensor:
    if name == "zero_fraction":
        return (vector.numel() - torch.count_nonzero(vector)).float() / vector.numel()
    wide = torch.promote_types(vector.dtype, torch.float32)
    largest: Tensor = torch.linalg.vector_norm(vector, float("inf")).to(wide)
    return largest
