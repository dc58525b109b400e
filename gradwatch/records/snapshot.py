"""Measurements of one step: the sites of one optimizer, and everything known of their gradients.

Axes: S sites (parameters, then tapped modules). Every array in these records is immutable by convention: whoever builds
one of these objects hands it over and never writes to it again, so a sink may keep it without copying.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.columns import scalar_name
from gradwatch.records.histogram import Histogram

FloatArray = NDArray[np.floating[Any]]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Sites:
    """Places where gradients are measured: S parameters and tapped modules of one optimizer.

    Fields, all of length S: `names` torch FQN without wrapper prefixes; `kinds` "param", "module" or "rank"; `numels`
    elements; `ndims` dimensions of the tensor (0 for what is none); `depths` order counted from the input (0 first), as
    first gradients arrived, of those not seen yet as they were registered; `groups` the label group each site was given
    by a rule file ("" before).
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    numels: NDArray[np.int64]
    ndims: NDArray[np.int64]
    depths: NDArray[np.int64]
    groups: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def select(self, glob: str) -> BoolArray:
        """bool[S]: the sites whose name matches a case-sensitive shell glob (`*` crosses dots)."""
        matches = re.compile(fnmatch.translate(glob)).match
        return np.fromiter((matches(name) is not None for name in self.names), bool, len(self.names))

    def alike(self, other: Sites) -> bool:
        """True if these are the same sites, whatever groups a rule file gave them."""
        # By their bytes: `np.array_equal` is a dozen Python calls.
        return (
            self.names == other.names
            and self.kinds == other.kinds
            and self.numels.tobytes() == other.numels.tobytes()
            and self.ndims.tobytes() == other.ndims.tobytes()
            and self.depths.tobytes() == other.depths.tobytes()
        )

    def labelled(self, groups: tuple[str, ...]) -> Sites:
        """The same sites carrying the label groups of a rule file."""
        return replace(self, groups=groups)


class Column(NamedTuple):
    """One measured quantity over the sites: `values[S]`, and `present[S]` (False = not measured this step)."""

    values: FloatArray
    present: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything measured about one `optimizer.step()`.

    `norm[S]` float32 is the L2 norm of the gradient the optimizer is about to get, before any clipping;
    it means something only where `calls[S] > 0` (how many times a gradient arrived; 0 = none this step). NaN
    and Inf there always mean "this gradient is not finite" (or its true norm exceeds float32).
    `coef[S]` is the smallest multiplier applied between `norm` and the optimizer (1 = untouched).
    `total_norm` is the root sum of squares over all parameters; `total_norm_applied` the same after clipping. All of
    `coef` and `total_norm_applied` are NaN where that is not known (`applied_known`), which a loop without an
    optimizer may leave so.
    `columns` holds only what rules asked for, and `nonfinite` (elements) / `norm_overflow` on suspicion.
    `loss_scale` is that of the GradScaler these gradients went through, None without one. `scalars` holds the
    other one-per-step values: `loss`, `lr`, `confirmed_jump` and `confirmed_norm` where an earlier step has ruined the
    weights, and under a GradScaler `scaler_skip`, 1 where it rejected the step (gradients overflowed, the optimizer
    did not move) and 0 where not. `provisional`: the numbers may be
    post-clip because the loop was not learned yet; exported, never learned. `coverage` is parameters
    measurable / expected, 0..1. `histograms` are, by the index of the site, of gradients of parameters and of
    activations of modules.
    """

    optimizer: int
    step: int
    sites: Sites
    norm: NDArray[np.float32]
    calls: NDArray[np.int32]
    coef: NDArray[np.float32]
    total_norm: float
    total_norm_applied: float
    loss_scale: float | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    micro: int = 1
    provisional: bool = False
    coverage: float = 1.0
    histograms: Mapping[int, Histogram] = field(default_factory=dict)

    def column(self, name: str) -> Column | None:
        """The named per-site column, derived where it can be; None when it was not measured this step."""
        found = self.columns.get(name)
        if found is not None:
            return found
        present = self.calls > 0
        if name == "norm":
            return Column(self.norm, present)
        if name == "rms":
            sizes = np.sqrt(np.maximum(self.sites.numels, 1).astype(np.float32))
            return Column(self.norm / sizes, present)
        if name == "norm_applied":
            return Column(self.norm * self.coef, present & ~np.isnan(self.coef))
        if name == "coef":
            return Column(self.coef, present & ~np.isnan(self.coef))
        if name == "calls":
            return Column(self.calls.astype(np.float32), np.ones(len(self.sites), bool))
        if name in ("nonfinite", "norm_overflow"):
            # Absent columns mean that no norm was suspicious: every element is finite.
            return Column(np.zeros(len(self.sites), np.float32), present)
        return None

    @property
    def applied_known(self) -> bool:
        """True if it is known by which gradients the weights were moved."""
        return not (math.isnan(self.total_norm_applied) and len(self.coef) and np.isnan(self.coef).all())

    @property
    def loss_without_scale_known(self) -> bool:
        """True if the loss is what it would be without a loss scale: finite, or NaN, which no scale makes of a number.

        Inf may be the scaled loss that exceeds its dtype.
        """
        return not math.isinf(self.scalars.get("loss", math.inf))

    def wide_norm(self) -> NDArray[np.float64]:
        """float64[S]: `norm`; where it only overflowed float32 the total norm, which is finite and no smaller."""
        norms = self.norm.astype(np.float64)
        overflow = self.columns.get("norm_overflow")
        if overflow is not None and math.isfinite(self.total_norm):
            norms[(overflow.values > 0) & np.isinf(norms) & (self.calls > 0)] = self.total_norm
        return norms

    def nonfinite(self) -> BoolArray:
        """bool[S]: the gradients that hold a NaN or Inf; by their norms where elements were not counted."""
        found: BoolArray = ~np.isfinite(self.norm)
        counted = self.columns.get("nonfinite")
        if counted is not None:
            found = np.where(counted.present, counted.values > 0, found)
        return found & (self.calls > 0)

    def scalar(self, name: str) -> float | None:
        """A one-per-step value (`loss`, `lr`, `total_norm`, `observed.NAME` …); None when not observed."""
        if name == "total_norm":
            return self.total_norm
        if name == "loss_scale":
            return self.loss_scale
        return self.scalars.get(scalar_name(name))
