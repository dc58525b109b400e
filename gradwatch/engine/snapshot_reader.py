"""Samples of series, read from the Snapshot of one step.

Axes: S sites, I selected sites, K series.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.detectors import Sample
from gradwatch.engine.judged_steps.staggered_judging import InTurn
from gradwatch.engine.series import Index, Series, roots_of
from gradwatch.records.columns import AVERAGED, COUNT_COLUMNS, LARGEST, ROOT_MEAN_SQUARED, SMALLEST, SUMMED
from gradwatch.records.snapshot import BoolArray, FloatArray, Snapshot

DERIVED = frozenset({"norm_applied", "coef"})
"""Columns that `Snapshot.column` makes from the norms."""

HERE: BoolArray = np.ones(1, np.bool_)
HERE.flags.writeable = False


class Reader:
    """Reads samples of series from one Snapshot; each column and each bound is computed once.

    Bounds come first: the smallest and largest values present (NaN if any is; +inf, -inf if none); most rules
    need no more than that on a healthy step. `roots[S]` are those of `roots_of`, kept between steps. Of staggered
    series only those `in_turn` have samples.
    """

    __slots__ = (
        "_bounds",
        "_columns",
        "_in_turn",
        "_presence",
        "_roots",
        "_scalars",
        "snapshot",
    )

    def __init__(self, snapshot: Snapshot, in_turn: InTurn, roots: FloatArray | None = None) -> None:
        self.snapshot = snapshot
        self._in_turn = in_turn
        self._roots = roots_of(snapshot.sites) if roots is None else roots
        self._presence: tuple[BoolArray, bool] | None = None
        self._columns: dict[str, tuple[Any, BoolArray, bool] | None] = {}
        self._bounds: dict[str, tuple[float, float] | None] = {}
        self._scalars: dict[str, float | None] = {}

    def scalar(self, name: str) -> float | None:
        """A one-per-step value, or None if it was not observed."""
        if name not in self._scalars:
            value = self.snapshot.scalar(name)
            self._scalars[name] = None if value is None else float(value)
        return self._scalars[name]

    def column(self, name: str) -> tuple[Any, BoolArray, bool] | None:
        """`(values[S], present[S], True if all are present)`, or None if the column was not measured."""
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def _read(self, name: str) -> tuple[Any, BoolArray, bool] | None:
        snapshot = self.snapshot
        if name in COUNT_COLUMNS:
            return self._count(name)
        found = snapshot.columns.get(name)
        if found is not None:
            return found.values, found.present, bool(found.present.all())
        if name == "norm":
            return self._norms(), *self._called()
        if name == "rms":
            return self._norms() / self._roots, *self._called()
        if name == "calls":
            return snapshot.calls, np.ones(len(snapshot.calls), np.bool_), True
        derived = snapshot.column(name) if name in DERIVED else None
        return None if derived is None else (derived.values, derived.present, self._called()[1])

    def _called(self) -> tuple[BoolArray, bool]:
        """bool[S]: the sites that have a gradient (a module: that were called); and whether all have."""
        if self._presence is None:
            called: BoolArray = self.snapshot.calls > 0
            self._presence = called, bool(called.all())
        return self._presence

    def _norms(self) -> FloatArray:
        """[S]: beyond float32 too, where an overflow was reported."""
        snapshot = self.snapshot
        return snapshot.wide_norm() if "norm_overflow" in snapshot.columns else snapshot.norm

    def _count(self, name: str) -> tuple[Any, BoolArray, bool]:
        """Counts of elements; at sites where the capture gave none, 1 if the norm itself shows it, else 0.

        Counts that do not tell NaN from Inf stand for both.
        """
        columns = self.snapshot.columns
        found = columns.get(name)
        if found is None and name != "norm_overflow":
            found = columns.get("nonfinite")
        nonfinite = self._by_norm(name)
        if found is None:
            return nonfinite, *self._called()
        present = found.present | self._called()[0]
        return np.where(found.present, found.values, nonfinite), present, bool(present.all())

    def _by_norm(self, name: str) -> NDArray[np.float32]:
        """float32[S]: 1 where the norm is NaN or infinite, and not because it overflowed."""
        norm, overflow = self.snapshot.norm, self.snapshot.columns.get("norm_overflow")
        nan, infinite = np.isnan(norm), np.isinf(norm)
        if overflow is not None:
            infinite &= ~(overflow.present & (overflow.values > 0))
        nothing = np.zeros(len(norm), np.bool_)
        by_name = {"nan_count": nan, "inf_count": infinite, "norm_overflow": nothing}
        return by_name.get(name, nan | infinite).astype(np.float32)

    def suspicious(self) -> bool:
        """True if any gradient may hold a NaN or Inf, or a norm beyond float32."""
        columns = self.snapshot.columns
        if "nonfinite" in columns or "norm_overflow" in columns:
            return True
        bounds = self._column_bounds("norm")
        return bounds is not None and not bounds[1] < math.inf

    def bounds(self, series: Series) -> tuple[float, float] | None:
        """The smallest and largest value of the whole column of a series; None if it was not measured at this step."""
        if series.scope == "scalar":
            value = self.scalar(series.column)
            return None if value is None else (value, value)
        if series.column in COUNT_COLUMNS and not self.suspicious():
            return 0.0, 0.0
        if series.owners is not None or series.every > 1:
            return self.own_bounds(series)
        return self._column_bounds(series.column)

    def own_bounds(self, series: Series) -> tuple[float, float] | None:
        """The smallest and largest value of the series itself: tighter than `bounds`, and dearer."""
        whole = series.index is None and series.owners is None and series.phases is None
        if series.scope == "scalar" or whole:
            return self.bounds(series)
        if series.key not in self._bounds:
            sample = self.sample(series)
            self._bounds[series.key] = None if sample is None else _bounds(sample.values, sample.present)
        return self._bounds[series.key]

    def _column_bounds(self, name: str) -> tuple[float, float] | None:
        key = f"\0{name}"  # no series has such a key
        if key not in self._bounds:
            found = self.column(name)
            self._bounds[key] = None if found is None else _bounds(found[0], None if found[2] else found[1])
        return self._bounds[key]

    def sample(self, series: Series, columns: tuple[str, ...] = ()) -> Sample | None:
        """The K samples of a series, with `columns[1:]` as `aux`; None if it was not measured at this step."""
        if series.scope == "scalar":
            value = self.scalar(series.column)
            beside = {name: np.array([self._scalar_or_nan(name)]) for name in columns[1:]}
            return None if value is None else Sample(np.array([value]), HERE, beside)
        if series.every > 1 and series.phases is None and self.snapshot.step % series.every:
            return None
        found = self.column(series.column)
        if found is None:
            return None
        values, present, _ = found
        if series.owners is not None:
            with np.errstate(all="ignore"):  # a NaN, or a square beyond float64, says so itself
                return self._collect(series, values, present)
        if series.index is not None:
            values, present = values[series.index], present[series.index]
        if series.phases is not None:
            turn = self._in_turn.get(series.key)
            if turn is None or not (present := present & turn.mask).any():
                return None
        if len(columns) < 2:
            return Sample(values, present)
        return Sample(values, present, {name: self._beside(series, name) for name in columns[1:]})

    def _scalar_or_nan(self, name: str) -> float:
        value = self.scalar(name)
        return math.nan if value is None else value

    def _beside(self, series: Series, name: str) -> FloatArray:
        found = self.column(name)
        if found is None:
            return np.full(len(series), np.nan, np.float32)
        values: FloatArray = np.where(found[1], found[0], np.nan)
        return values if series.index is None else values[series.index]

    def _collect(self, series: Series, values: Any, present: BoolArray) -> Sample:
        """One value per group or total: a sum, an extreme, a mean or a root sum of squares, by column."""
        assert series.index is not None
        assert series.owners is not None
        there = present[series.index]
        owners, part = series.owners[there], values[series.index[there]].astype(np.float64)
        size, column = len(series), series.column
        here: BoolArray = np.bincount(owners, minlength=size) > 0
        if column in LARGEST:
            return Sample(_extreme(np.maximum, -math.inf, owners, part, size), here)
        if column in SMALLEST:
            return Sample(_extreme(np.minimum, math.inf, owners, part, size), here)
        if column in SUMMED:
            return Sample(_total(owners, part, size), here)
        if column not in AVERAGED and column not in ROOT_MEAN_SQUARED:
            return Sample(np.sqrt(_total(owners, np.square(part), size)), here)
        weight = np.maximum(self.snapshot.sites.numels[series.index[there]], 1).astype(np.float64)
        elements = np.maximum(_total(owners, weight, size), 1.0)
        if column in AVERAGED:
            return Sample(_total(owners, weight * part, size) / elements, here)
        return Sample(np.sqrt(_total(owners, weight * np.square(part), size) / elements), here)


def _total(owners: Index, part: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """float64[K]: the sum of the parts of each owner."""
    return np.bincount(owners, weights=part, minlength=size).astype(np.float64, copy=False)


def _extreme(
    choose: np.ufunc, start: float, owners: Index, part: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    out = np.full(size, start)
    choose.at(out, owners, part)
    return out


def _bounds(values: Any, present: BoolArray | None) -> tuple[float, float]:
    there = values if present is None or bool(present.all()) else values[present]
    if len(there) == 0:
        return math.inf, -math.inf
    return float(there.min()), float(there.max())
