"""Facts across ranks: what a rank tells of its step, added up over all of them in one vector.

Where gradients are sharded, or ranks hold different parameters (pipeline stages), a sum of squares per
parameter makes the norm of the whole. Where every rank holds all of them, the norms are only compared. Beside
these stand a few numbers per rank, each in a place of its own, so that a sum carries them too. Facts are
reduced, never decisions: every rank judges the same numbers.

Axes: K parameters of this rank's capture, U parameters of all ranks together, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gradwatch.capture.columns.sampled import WEIGHT_NORM_FLOOR
from gradwatch.capture.window import Norms, Window
from gradwatch.engine.needs import BURSTS
from gradwatch.reading.batched import FLOAT32_MAX, Detail
from gradwatch.reading.cpu import CpuNorms
from gradwatch.records.snapshot import Column, Sites

Vector = NDArray[np.float64]

HEAD = ("facts", "blind", "provisional", "rejected", "loss", "losses")
BY_RANK = ("step", "norm_local", "nonfinite", "site", "checksum", "parted")
POOLED = ("squares", "applied", "calls", "nan", "inf")
COMPARED = ("hash", "hash_squared")
HOLDER = 2.0**26
"""Added to a rank's `calls` of a parameter it had a gradient for: sums count arrivals and ranks at once."""
PACE = 0.05
"""Weight of a new sample in a rank's own idea of a parameter's usual local norm."""
REDUCED_SAMPLES = ("zero_fraction", "weight_norm", "update_ratio")
"""Sampled columns that can be made of shards' by adding up; the largest element (`max_abs`) cannot."""
RANK_NORM, RANK_MISMATCH, RANK_SITE = "rank_norm", "rank_mismatch", "rank_site"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Layout of the vector of facts; the same on all ranks but for `rank`, `own` and `counts`.

    `sites` the U parameters of all ranks; `own[K]` where this rank's stand among them; `counts[K]` 1.0 where
    this rank's part is to be added up, 0.0 where another rank's stands for it, and `share[K]` its part of the
    elements. `pooled`: norms are sums over ranks, not each rank's own. `sampled`: columns pooled beside them.
    """

    sites: Sites
    own: NDArray[np.intp]
    counts: Vector
    share: Vector
    rank: int
    world: int
    pooled: bool
    sampled: tuple[str, ...] = ()
    _start: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = 0
        blocks = ((HEAD, 1), (BY_RANK, self.world), (self._columns(), len(self.sites)))
        for names, length in blocks:
            for name in names:
                self._start[name] = size
                size += length
        self._start["end"] = size

    def _columns(self) -> tuple[str, ...]:
        if not self.pooled:
            return COMPARED
        sampled = [f"{name}{part}" for name in self.sampled for part in ("", "/present")]
        sizes = [size_of(name) for name in self.sampled if plain(name) == "update_ratio"]
        return (*POOLED, *sampled, *sizes)

    def empty(self) -> Vector:
        """A vector that says nothing."""
        return np.zeros(self._start["end"])

    def part(self, vector: Vector, name: str) -> Vector:
        """The view of a vector that belongs to `name`: one number, W, or U of them."""
        start = self._start[name]
        length = 1 if name in HEAD else self.world if name in BY_RANK else len(self.sites)
        return vector[start : start + length]


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


@dataclass(frozen=True, slots=True, eq=False)
class ReducedFacts:
    """Facts of one step, reduced over all ranks; equal on every rank.

    `complete`: every rank sent its facts. `blind`: the ranks that could not, by our own fault. `steps[W]` the
    ranks' own counts of the step (-1 of one that is blind).
    """

    layout: Layout
    total: Vector

    def head(self, name: str) -> float:
        """A number that stands for all ranks."""
        return float(self.layout.part(self.total, name)[0])

    def by_rank(self, name: str) -> Vector:
        """float64[W]."""
        return self.layout.part(self.total, name)

    def column(self, name: str) -> Vector:
        """float64[U]."""
        return self.layout.part(self.total, name)

    @property
    def complete(self) -> bool:
        """True if every rank sent its facts, about the same step."""
        steps = self.by_rank("step")
        return self.head("facts") == self.layout.world and bool((steps == steps[0]).all())

    @property
    def blind(self) -> list[int]:
        """The ranks that took part without facts."""
        return [int(rank) for rank in np.flatnonzero(self.by_rank("step") == 0)]

    @property
    def diverged(self) -> NDArray[np.bool_]:
        """bool[W]: the ranks that could not do what was decided of their last step, unless none of them could."""
        alone = self.by_rank("parted") > 0
        return alone & ~alone.all()

    @property
    def loss(self) -> float | None:
        """The mean of the losses observed on the ranks; None where none was observed."""
        count = self.head("losses")
        return self.head("loss") / count if count else None


def blind(layout: Layout) -> Vector:
    """The vector of a rank that has no facts for the others, by a fault of its own (or nothing to say yet)."""
    vector = layout.empty()
    layout.part(vector, "blind")[0] = 1
    return vector


def encode(
    layout: Layout,
    window: Window,
    norms: tuple[Norms, Norms],
    values: Mapping[str, float],
    columns: Mapping[str, Column],
    local: Column | None,
    usual: Usual,
) -> Vector:
    """The facts of one window: `norms` raw and applied, `values` by scalar, `columns` sampled, local norms."""
    vector = layout.empty()

    def put(name: str, value: float) -> None:
        layout.part(vector, name)[0] = value

    put("facts", 1)
    put("provisional", float(window.provisional))
    put("rejected", float(bool(values.get("scaler_skip"))))
    if "loss" in values:
        put("loss", values["loss"])
        put("losses", 1)
    layout.part(vector, "step")[layout.rank] = window.step + 1
    if local is not None and local.present.any():
        there = local.values[local.present].astype(np.float64)
        layout.part(vector, "norm_local")[layout.rank] = math.sqrt(np.dot(there, there))
        layout.part(vector, "nonfinite")[layout.rank] = np.count_nonzero(~np.isfinite(there))
        layout.part(vector, "site")[layout.rank] = layout.own[usual.strangest(local)] + 1
    if layout.pooled:
        _pool(layout, vector, window, norms, columns)
    else:
        _compare(layout, vector, norms[0])
    return vector


def _pool(
    layout: Layout,
    vector: Vector,
    window: Window,
    norms: tuple[Norms, Norms],
    columns: Mapping[str, Column],
) -> None:
    """Every column of parameters, where this rank's part counts."""
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
    for name in layout.sampled:
        column = columns.get(name)
        if column is not None:
            taken = mine & column.present
            layout.part(vector, f"{name}/present")[layout.own[taken]] = 1
            layout.part(vector, name)[layout.own[taken]] = _addable(layout, name, column, columns)[taken]
        size = size_of(name)
        if plain(name) == "update_ratio" and size in columns:
            layout.part(vector, size)[at] = np.square(columns[size].values.astype(np.float64)[mine])


def plain(name: str) -> str:
    """The name of a column, however often it is read."""
    return name.removesuffix(BURSTS)


def size_of(name: str) -> str:
    """Name of the column with the norms of the weights, to which an update ratio of this name is relative."""
    return "size" + name.removeprefix("update_ratio")


def _addable(layout: Layout, name: str, column: Column, columns: Mapping[str, Column]) -> Vector:
    """A shard's value in the form in which those of all shards add up."""
    values = column.values.astype(np.float64)
    if plain(name) == "zero_fraction":
        return values * layout.share
    if plain(name) == "update_ratio":
        return np.square(values * np.maximum(columns[size_of(name)].values, WEIGHT_NORM_FLOOR))
    return np.square(values)


def _compare(layout: Layout, vector: Vector, raw: Norms) -> None:
    """A hash of every norm, and one of all of them."""
    whole, short = hashes(raw)
    layout.part(vector, "checksum")[layout.rank] = whole
    layout.part(vector, "hash")[layout.own] = short
    layout.part(vector, "hash_squared")[layout.own] = np.square(short)


def hashes(norms: Norms) -> tuple[float, Vector]:
    """(52 bits of all norms, 16 bits of each), exact as float64; equal for equal bits, any NaN being equal."""
    clean = np.where(np.isnan(norms), np.nan, norms)
    mixed = clean.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    places = np.arange(1, 2 * len(mixed), 2, dtype=np.uint64)
    whole = int((mixed * places).sum(dtype=np.uint64)) >> 12
    return float(whole), (mixed >> np.uint64(48)).astype(np.float64)


# -- what the others said ----------------------------------------------------------------------------------


def pooled_window(reduced: ReducedFacts, window: Window) -> Window:
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
        repeats=None,
        provisional=reduced.head("provisional") > 0,
    )


def pooled_columns(reduced: ReducedFacts) -> dict[str, Column]:
    """The sampled columns of the whole parameters."""
    found = {}
    for name in reduced.layout.sampled:
        present = reduced.column(f"{name}/present") > 0
        if present.any():
            found[name] = Column(_added_up(reduced, name).astype(np.float32), present)
    return found


def _added_up(reduced: ReducedFacts, name: str) -> Vector:
    total = reduced.column(name)
    if plain(name) == "zero_fraction":
        return total
    if plain(name) == "update_ratio":
        return np.sqrt(total) / np.maximum(np.sqrt(reduced.column(size_of(name))), WEIGHT_NORM_FLOOR)
    return np.sqrt(total)


def rank_columns(reduced: ReducedFacts, replicas: bool) -> dict[str, Column]:
    """Columns by rank, float[W]; `replicas`: their reduced norms are meant to be the same bits."""
    norm, place = reduced.by_rank("norm_local"), reduced.by_rank("site")
    columns = {}
    if (place > 0).any():
        columns[RANK_NORM] = Column(norm, place > 0)
        columns[RANK_SITE] = Column(place - 1, place > 0)
    if replicas and not reduced.layout.pooled:
        # A rank that did not clip or skip with the others holds other weights, whatever its reduced gradients say.
        odd, differing = deviating(reduced) | reduced.diverged, differing_sites(reduced)
        counted = max(1, len(differing)) if odd.any() else 0
        columns[RANK_MISMATCH] = Column(np.where(odd, float(counted), 0.0), np.ones(len(odd), bool))
        if len(differing):
            named = np.where(odd, float(differing[-1]), place - 1)
            columns[RANK_SITE] = Column(named, (place > 0) | odd)
    return columns


def agreeing(reduced: ReducedFacts) -> bool:
    """True if all ranks have the same norms, and some: then they are replicas."""
    return not reduced.layout.pooled and not deviating(reduced).any()


def deviating(reduced: ReducedFacts) -> NDArray[np.bool_]:
    """bool[W]: the ranks whose norms are not those of the majority; all of them where there is none."""
    checksums = reduced.by_rank("checksum")
    kinds, counts = np.unique(checksums, return_counts=True)
    if len(kinds) == 1:
        return np.zeros(len(checksums), bool)
    if 2 * counts.max() <= len(checksums):
        return np.ones(len(checksums), bool)
    odd: NDArray[np.bool_] = checksums != kinds[counts.argmax()]
    return odd


def differing_sites(reduced: ReducedFacts) -> NDArray[np.intp]:
    """The sites whose hashes are not equal on all ranks: by Cauchy-Schwarz, W·Σh² = (Σh)² only if they are."""
    total = reduced.column("hash").astype(np.int64)
    return np.flatnonzero(
        reduced.layout.world * reduced.column("hash_squared").astype(np.int64) != total * total
    )
