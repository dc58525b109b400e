"""Facts of a step added up over all ranks in one vector: its layout, and what it says.

Where gradients are sharded, or ranks hold different parameters (pipeline stages), a sum of squares per
parameter makes the norm of the whole. Where every rank holds all of them, the norms are only compared. Beside
these stand a few numbers per rank, each in a place of its own, so that a sum carries them too. Facts are
reduced, never decisions: every rank judges the same numbers.

Axes: U parameters of all ranks together, K of them on this rank, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import Sites

Vector: TypeAlias = NDArray[np.float64]

HEAD = ("facts", "blind", "provisional", "rejected")
BY_RANK = ("step", "norm_local", "nonfinite", "site", "checksum", "parted", "missed", "compared")
POOLED = ("squares", "applied", "calls", "nan", "inf")
COMPARED = ("hash", "hash_squared")


def sum_of(scalar: str) -> str:
    """The name of the sum of a one-per-step value over the ranks that have one."""
    return f"sum of {scalar}"


def count_of(scalar: str) -> str:
    """The name of the number of ranks that have a one-per-step value."""
    return f"count of {scalar}"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Layout of the vector of facts; the same on all ranks but for `rank`, `own` and `counts`.

    `sites` the U parameters of all ranks; `own[K]` where this rank's stand among them; `counts[K]` 1.0 where
    this rank's part is to be added up, 0.0 where another rank's stands for it, and `share[K]` its part of the
    elements. `pooled`: norms are sums over ranks, not each rank's own. `costly`: columns of whole
    tensors pooled beside them. `averaged`: one-per-step values whose mean over the ranks that have one is taken.
    """

    sites: Sites
    own: NDArray[np.intp]
    counts: Vector
    share: Vector
    rank: int
    world: int
    pooled: bool
    costly: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ("loss",)
    _start: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = 0
        blocks = ((self._heads(), 1), (BY_RANK, self.world), (self._columns(), len(self.sites)))
        for names, length in blocks:
            for name in names:
                self._start[name] = size
                size += length
        self._start["end"] = size

    def _heads(self) -> tuple[str, ...]:
        return (*HEAD, *map(sum_of, self.averaged), *map(count_of, self.averaged))

    def _columns(self) -> tuple[str, ...]:
        if not self.pooled:
            return COMPARED
        costly = [f"{name}{part}" for name in self.costly for part in ("", "/present")]
        sizes = [UPDATED] if "update_ratio" in self.costly else []
        return (*POOLED, *costly, *sizes)

    def empty(self) -> Vector:
        """A vector that says nothing."""
        return np.zeros(self._start["end"])

    def part(self, vector: Vector, name: str) -> Vector:
        """The view of a vector that belongs to `name`: one number, W, or U of them."""
        start = self._start[name]
        length = 1 if start < self._start[BY_RANK[0]] else self.world if name in BY_RANK else len(self.sites)
        return vector[start : start + length]


@dataclass(frozen=True, slots=True, eq=False)
class ReducedFacts:
    """Facts of one step, reduced over all ranks; equal on every rank.

    `complete`: every rank sent its facts. `blind`: the ranks that could not (an internal error). `steps[W]` the
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
    def missed(self) -> Vector:
        """float64[W]: boundaries since the last exchange that each rank left without having measured anything."""
        return self.by_rank("missed")

    @property
    def comparable(self) -> bool:
        """True if all ranks are to have the same norms: of whole gradients, and of the same steps."""
        counts = self.by_rank("compared")
        return not (self.layout.pooled or self.missed.any()) and bool((counts == counts[0]).all())

    @property
    def averages(self) -> dict[str, float]:
        """The means over the ranks that had a value, of those that any had."""
        counts = {name: self.head(count_of(name)) for name in self.layout.averaged}
        return {name: self.head(sum_of(name)) / count for name, count in counts.items() if count}


def blind(layout: Layout) -> Vector:
    """The vector of a rank that has no facts for the others, by a fault of its own (or nothing to say yet)."""
    vector = layout.empty()
    layout.part(vector, "blind")[0] = 1
    return vector


UPDATED = "updated_norm"
"""Name of the column with the norms of the weights to which update ratios are relative."""
