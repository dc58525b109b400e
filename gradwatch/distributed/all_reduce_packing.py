"""Facts of a step that one rank gives to the others, written into the vector that is added up over all ranks.

Axes: K parameters of this rank's capture, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradwatch.capture.columns.pending_columns import PendingColumns
from gradwatch.capture.columns.update_ratio import PendingRatio
from gradwatch.capture.snapshot_assembly import Extras
from gradwatch.capture.window.window_norms import Norms, WindowNorms
from gradwatch.distributed.all_reduce_layout import UPDATED, Layout, Vector, count_of, sum_of
from gradwatch.distributed.replica_divergence import compare
from gradwatch.distributed.sharded_norms import pool
from gradwatch.records.snapshot import Column

PACE = 0.05
"""Weight of a new sample in a rank's own idea of a parameter's usual local norm."""


@dataclass(slots=True)
class Usual:
    """A rank's own idea of its usual local norms, float64[K] in nats: only to name a parameter, never to judge."""

    level: Vector

    def strangest(self, local: Column) -> int:
        """The parameter that explains this rank's local gradients best: not finite, or farthest from usual."""
        values = local.values.astype(np.float64)
        broken = local.present & ~np.isfinite(values)
        if broken.any():
            return int(np.flatnonzero(broken)[-1])
        usable = local.present & (values > 0)
        x = np.log(np.where(usable, values, 1.0))
        distance = np.where(usable & np.isfinite(self.level), np.abs(x - self.level), -1.0)
        strangest = int(np.argmax(distance))
        moved = np.where(np.isfinite(self.level), self.level + PACE * (x - self.level), x)
        self.level = np.where(usable, moved, self.level)
        return strangest


def encode(
    layout: Layout,
    window: WindowNorms,
    norms: tuple[Norms, Norms],
    values: Mapping[str, float],
    columns: Mapping[str, Column],
    local: Column | None,
    usual: Usual,
    earlier: Sequence[Norms] = (),
) -> Vector:
    """The facts of one window: `norms` raw and applied, `values` by scalar, `columns` of whole tensors, local norms.

    `earlier`: the norms of windows before it that are compared too, which replicas have in common.
    """
    vector = layout.empty()

    def put(name: str, value: float) -> None:
        layout.part(vector, name)[0] = value

    put("facts", 1)
    put("provisional", float(window.provisional))
    put("rejected", float(bool(values.get("scaler_skip"))))
    for name in layout.averaged:
        if name in values:
            put(sum_of(name), values[name])
            put(count_of(name), 1)
    layout.part(vector, "step")[layout.rank] = window.step + 1
    if local is not None and local.present.any():
        there = local.values[local.present].astype(np.float64)
        layout.part(vector, "norm_local")[layout.rank] = math.sqrt(np.dot(there, there))
        layout.part(vector, "nonfinite")[layout.rank] = np.count_nonzero(~np.isfinite(there))
        layout.part(vector, "site")[layout.rank] = layout.own[usual.strangest(local)] + 1
    if layout.pooled:
        pool(layout, vector, window, norms, columns)
    else:
        compare(layout, vector, [*earlier, norms[0]])
    return vector


def columns_of(extras: Extras) -> dict[str, Column]:
    """The columns of a step, with ‖w‖ behind ‖Δw‖/‖w‖, without which shards' ratios do not add up."""
    columns = {name: column for one in extras.params for name, column in one.columns().items()}
    for one in extras.params:
        ratio = one.parts.get("update_ratio") if isinstance(one, PendingColumns) else None
        if isinstance(ratio, PendingRatio) and "update_ratio" in columns:
            columns[UPDATED] = Column(ratio.size(), columns["update_ratio"].present)
            break
    return columns
