"""Columns of gradient values: the fraction of exact zeros and the largest magnitude."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from gradwatch.capture.columns.pending_columns import PendingColumns
from gradwatch.capture.columns.strided_samples import accumulator, sampled_rows, start_copy, whole_rows
from gradwatch.engine.columns_needed import BURSTS
from gradwatch.reading.device import Number
from gradwatch.reading.layouts import dense

GRADIENT_COLUMNS = frozenset({"zero_fraction", "max_abs"})


def read_gradient_values(
    pending: PendingColumns, due: Iterable[str], grads: Sequence[Tensor | None], scale: Number
) -> None:
    """Put the columns of gradients that are `due` into `pending`; `scale` is the loss scale still in `grads`."""
    # A shard may be empty though the gradient is not.
    have = [k for k, grad in enumerate(grads) if grad is not None and dense(grad).numel()]
    tensors: list[Tensor] = [grads[k] for k in have]  # type: ignore[misc]
    present = np.zeros(pending.count, bool)
    present[have] = True
    for name in due:
        plain = name.removesuffix(BURSTS)
        if plain not in GRADIENT_COLUMNS:
            continue
        rows, order = sampled_rows(tensors) if name == "zero_fraction" + BURSTS else whole_rows(tensors)
        positions = np.array(have, np.intp)[order]
        if plain == "zero_fraction":
            parts = [(row.shape[1] - torch.count_nonzero(row, dim=1)).float() / row.shape[1] for row in rows]
            pending.parts[name] = start_copy(parts, positions, pending.count)
        else:
            parts = [torch.linalg.vector_norm(row, float("inf"), dim=1).to(accumulator(row)) for row in rows]
            pending.parts[name] = start_copy(parts, positions, pending.count, scale=scale)
        pending.present[name] = present
