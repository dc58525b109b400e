"""Norms of whole parameters, made of the sums of squares of the parts that ranks hold (FSDP, pipeline stages).

Axes: K parameters of this rank's capture, U parameters of all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gradwatch.capture.columns.update_ratio import WEIGHT_NORM_FLOOR
from gradwatch.capture.window.window_norms import Norms, WindowNorms
from gradwatch.distributed.all_reduce_layout import UPDATED, Layout, ReducedFacts, Vector
from gradwatch.reading.batched_norms import FLOAT32_MAX, Detail
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.records.columns import CATALOGUE, COSTLY_COLUMNS, ROOT_MEAN_SQUARED
from gradwatch.records.snapshot import Column

HOLDER = 2.0**26
"""Added to a rank's `calls` of a parameter it had a gradient for: sums count arrivals and ranks at once."""
BY_ELEMENTS = frozenset(one.name for one in CATALOGUE if one.sharded == "mean by elements")
REDUCED_COLUMNS = tuple(one.name for one in CATALOGUE if one.name in COSTLY_COLUMNS and one.sharded)
"""Columns of whole tensors that can be made of shards' by adding up; the largest element (`max_abs`) cannot."""


def pool(
    layout: Layout,
    vector: Vector,
    window: WindowNorms,
    norms: tuple[Norms, Norms],
    columns: Mapping[str, Column],
) -> None:
    """Write this rank's part of every column of parameters into its vector, where it counts."""
    mine = layout.counts > 0
    at = layout.own[mine]
    raw, applied = norms
    layout.part(vector, "squares")[at] = np.square(raw[mine])
    layout.part(vector, "applied")[at] = np.square(applied[mine])
    calls = window.calls[mine]
    layout.part(vector, "calls")[at] = calls + HOLDER * (calls > 0)
    for name, broken in (("nan", np.isnan(raw)), ("inf", np.isinf(raw))):
        counted = broken.astype(np.float64)
        for k, found in window.details.items():
            # A norm beyond float32 is finite here, so a detail always says what the elements are.
            counted[k] = found.nan if name == "nan" else found.inf
        layout.part(vector, name)[at] = counted[mine]
    for name in layout.costly:
        column = columns.get(name)
        if column is not None:
            taken = mine & column.present
            layout.part(vector, f"{name}/present")[layout.own[taken]] = 1
            layout.part(vector, name)[layout.own[taken]] = _addable(layout, name, column, columns)[taken]
        if name == "update_ratio" and UPDATED in columns:
            layout.part(vector, UPDATED)[at] = np.square(columns[UPDATED].values.astype(np.float64)[mine])


def _addable(layout: Layout, name: str, column: Column, columns: Mapping[str, Column]) -> Vector:
    """A shard's value in the form in which those of all shards add up."""
    values = column.values.astype(np.float64)
    if name in BY_ELEMENTS:
        return values * layout.share
    if name in ROOT_MEAN_SQUARED:
        return np.square(values) * layout.share
    if name == "update_ratio":
        return np.square(values * np.maximum(columns[UPDATED].values, WEIGHT_NORM_FLOOR))
    return np.square(values)


def pooled_window(reduced: ReducedFacts, window: WindowNorms) -> WindowNorms:
    """The window of the whole parameters, as every rank sees it."""
    raw = np.sqrt(reduced.column("squares"))
    applied = np.sqrt(reduced.column("applied"))
    packed = reduced.column("calls")
    holders = np.floor(packed / HOLDER)
    calls = np.rint((packed - holders * HOLDER) / np.maximum(holders, 1)).astype(np.int32)
    nan, inf = reduced.column("nan"), reduced.column("inf")
    details = {
        int(k): Detail(float(raw[k]), int(nan[k]), int(inf[k]))
        for k in np.flatnonzero(~(raw <= FLOAT32_MAX) | (nan + inf > 0))
    }
    reading = CpuNorms.of(raw, details)
    unchanged = np.array_equal(raw, applied, equal_nan=True)
    return replace(
        window,
        sites=reduced.layout.sites,
        raw=reading,
        after=reading if unchanged else CpuNorms.of(applied, {}),
        calls=calls,
        pruned=None,
        provisional=reduced.head("provisional") > 0,
    )


def pooled_columns(reduced: ReducedFacts) -> dict[str, Column]:
    """The columns of whole tensors, of the whole parameters."""
    found = {}
    for name in reduced.layout.costly:
        present = reduced.column(f"{name}/present") > 0
        if present.any():
            found[name] = Column(_added_up(reduced, name).astype(np.float32), present)
    return found


def _added_up(reduced: ReducedFacts, name: str) -> Vector:
    total = reduced.column(name)
    if name in BY_ELEMENTS:
        return total
    if name == "update_ratio":
        return np.sqrt(total) / np.maximum(np.sqrt(reduced.column(UPDATED)), WEIGHT_NORM_FLOOR)
    return np.sqrt(total)
