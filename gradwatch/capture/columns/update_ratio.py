"""Columns of the weights: their norm, and the update ratio, by how much of it they have changed since the last step.

That change is the optimizer's, and whatever the script itself has written to the weights between the two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradwatch.capture.columns.pending_columns import MovedParameters, PendingColumns
from gradwatch.capture.columns.strided_samples import (
    norm_factors,
    row_norms,
    sampled_rows,
    start_copy,
    whole_rows,
)
from gradwatch.reading.device import AsyncCopy, Floats

WEIGHT_COLUMNS = frozenset({"weight_norm", "update_ratio"})
# A weight matrix that starts at zero (LoRA B, zero-init residuals) has a huge first ratio and no problem.
WEIGHT_NORM_FLOOR = 0.1


class PendingRatio:
    """‖Δw‖ / max(‖w‖, 0.1) of K parameters, from two norms on their way."""

    def __init__(self, change: AsyncCopy, size: AsyncCopy) -> None:
        self._change = change
        self._size = size

    def ready(self) -> bool:
        """True if `values()` would return at once."""
        return self._change.ready() and self._size.ready()

    def size(self) -> Floats:
        """float32[K]: ‖w‖."""
        return self._size.values()

    def values(self) -> Floats:
        """float32[K]."""
        return np.divide(self._change.values(), np.maximum(self.size(), np.float32(WEIGHT_NORM_FLOOR)))


class WeightReader:
    """The weights of one capture, whole or `strided`, and as they were one step before."""

    def __init__(self, strided: bool) -> None:
        self._strided = strided
        self._previous: tuple[int, list[Tensor], MovedParameters] | None = None

    def discard(self) -> None:
        """The weights of this step are not needed at the next."""
        self._previous = None

    def read(
        self,
        pending: PendingColumns,
        asked: set[str],
        suffix: str,
        params: Sequence[Tensor],
        kept: MovedParameters | None,
        step: int,
    ) -> None:
        """Put the columns `asked` into `pending`; keep the weights where `kept` says which of them this step moves."""
        rows, positions = sampled_rows(params) if self._strided else whole_rows(params)
        factor = norm_factors(params) if self._strided else None
        if "weight_norm" in asked:
            norms = [row_norms(row) for row in rows]
            pending.parts["weight_norm" + suffix] = start_copy(norms, positions, pending.count, factor)
            pending.present["weight_norm" + suffix] = np.ones(pending.count, bool)
        before, self._previous = self._previous, None
        if "update_ratio" in asked and before is not None and before[0] == step - 1:
            _, old, moved = before
            if [row.shape for row in rows] == [row.shape for row in old]:
                changes = [row_norms(row - was) for row, was in zip(rows, old, strict=True)]
                sizes = [row_norms(was) for was in old]
                # Divided on the host: a factor sent to the device would make it wait.
                pending.parts["update_ratio" + suffix] = PendingRatio(
                    start_copy(changes, positions, pending.count, factor),
                    start_copy(sizes, positions, pending.count, factor),
                )
                pending.present["update_ratio" + suffix] = moved
        if kept is not None:
            self._previous = (step, [row.clone() for row in rows], kept)
