"""One optimizer of one process as the report shows it, downsampled: scalars by step, parameters by depth and step.

Axes: B buckets of steps, P parameters by depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CURVES = (
    "total_norm",
    "total_norm_applied",
    "loss",
    "lr",
    "loss_scale",
    "step_seconds",
    "overhead_seconds",
)
"""Scalars that a report draws; what is NaN or Inf in a bucket is marked in `Curve.bad`."""
COUNTS = ("steps", "skipped", "clipped", "clipped_by_script", "rejected", "provisional")
"""Steps counted per bucket: all; skipped by a rule; clipped or rescaled by a rule; those whose gradients became smaller
by the script: a clip of its own, or another write to `.grad`; those that a GradScaler rejected; those before the loop
was known."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Buckets of `width` steps; `starts[B]` is the first step of each."""

    starts: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One scalar: the smallest and the largest finite value of each bucket, NaN without one.

    `bad[B]`: some value of the bucket was NaN or Inf.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    bad: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """One column of all parameters, `low[B, P]` and `high[B, P]` as of a `Curve`."""

    low: NDArray[np.float32]
    high: NDArray[np.float32]
    bad: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """The parameters from the input to the output, and their columns at the steps at which these were recorded.

    `grids` has "norm", before any clipping, and "update_ratio" where a rule had it measured. `last[P]` is the last norm
    recorded, at `last_step`, `largest_step[P]` the step of the largest finite one (-1 = none). `recorded` counts the
    steps whose norms are in the grids.
    """

    names: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    depths: tuple[int, ...] = ()
    numels: tuple[int, ...] = ()
    axis: Axis = Axis((), 1)
    grids: Mapping[str, Grid] = field(default_factory=dict)
    last: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    last_step: int = -1
    recorded: int = 0
    largest_step: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """One optimizer of one process (`attempt` counts the processes that recorded as this rank).

    `counts` are those of COUNTS by bucket; `pruned`: the journal holds some steps no more. `own_seconds`
    of `seconds` were gradwatch's, in the steps recorded.
    """

    attempt: int
    optimizer: int
    steps: int
    first_step: int
    last_step: int
    axis: Axis
    curves: Mapping[str, Curve]
    counts: Mapping[str, NDArray[np.int64]]
    parameters: Parameters
    pruned: bool = False
    began: float = 0.0
    ended: float = 0.0
    own_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """`optimizer 0`, with the process where it is not the first."""
        return f"optimizer {self.optimizer}" + (f", process {self.attempt}" if self.attempt else "")

    def total(self, name: str) -> int:
        """The number of steps counted under a name of COUNTS."""
        return int(self.counts[name].sum())


def span(values: NDArray[Any]) -> tuple[float, float]:
    """The smallest and largest finite value; NaN twice without one."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)
