"""Snapshots, which the engine judges, of what windows found. S = K parameters, M tapped modules, W ranks; T steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gradwatch.capture.columns.histograms import PendingHistograms
from gradwatch.capture.loop_faults.alteration_onset import common_factor
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.reading.async_copy import host_value
from gradwatch.reading.batched_norms import FLOAT32_MAX, Detail
from gradwatch.reading.cpu_norms import CpuNorms, add_up_all
from gradwatch.reading.row_sums_by_blas import silently
from gradwatch.records.columns import SCALED_BY
from gradwatch.records.histogram import Histogram
from gradwatch.records.snapshot import Column, Sites, Snapshot

TINY = float(np.finfo(np.float32).smallest_subnormal)


def with_modules(sites: Sites, modules: tuple[str, ...]) -> Sites:
    """The sites of a capture followed by tapped modules."""
    return appended(sites, modules, "module")


def appended(sites: Sites, names: tuple[str, ...], kind: str) -> Sites:
    """The sites followed by others that are no parameters."""
    if not names:
        return sites
    zeros = np.zeros(len(names), np.int64)
    return Sites(
        names=sites.names + names,
        kinds=sites.kinds + (kind,) * len(names),
        numels=np.concatenate([sites.numels, zeros]),
        ndims=np.concatenate([sites.ndims, zeros]),
        depths=np.concatenate([sites.depths, np.arange(len(names))]),
    )


class Measured(Protocol):
    """Columns of one step, possibly still on their way."""

    def ready(self) -> bool:
        """True if `columns()` would return at once."""

    def columns(self) -> dict[str, Column]:
        """The columns; waits for what has not arrived."""


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """Columns read beside the norms: of the K parameters, of the M modules, and of the ranks.

    Histograms are of whole gradients, and of activations, that this rank holds.
    """

    params: tuple[Measured, ...] = ()
    modules: tuple[Measured, ...] = ()
    ranks: tuple[Measured, ...] = ()
    histograms: PendingHistograms | None = None
    module_histograms: PendingHistograms | None = None

    def ready(self) -> bool:
        """True if all of it is on the host."""
        for pending in (*self.params, *self.modules, self.histograms, self.module_histograms):
            if pending is not None and not pending.ready():
                return False
        return True


def assemble(
    optimizer: int,
    sites: Sites,
    window: WindowNorms,
    extras: Extras,
    scalars: Mapping[str, float],
    coverage: float,
) -> Snapshot:
    """The Snapshot of one step; waits for numbers still on their way from a device."""
    raw, after = window.wait()
    count = len(raw)
    missing, details = len(sites) - count, window.raw.details
    total = _total(raw, window.calls, details)
    # A total that float32 holds says that no norm is NaN, infinite or beyond float32.
    norms = raw.astype(np.float32) if TINY < total < FLOAT32_MAX and not details else as_float32(raw)
    columns = {} if total < FLOAT32_MAX else _suspicions(window, details, raw, norms, missing)
    applied = total if after is raw else _total(after, window.calls, details)
    if not columns and not applied < FLOAT32_MAX:
        # Finite at the end of backward and not any longer: the optimizer is about to get it all the same.
        wide = as_float32(after)
        columns = _suspicions(window, window.after.details, after, wide, missing)
        if columns and not columns["nonfinite"].values.any():  # no clip, then, and no NaN: judge what it gets
            raw, norms, total = after, wide, applied
    if extras.params or extras.modules or extras.ranks:
        _take_columns(columns, extras, count, missing)
    coef, calls = coefficients(raw, after), window.calls
    if missing:
        norms, calls, coef = _pad(norms, missing), _pad(calls, missing), _pad(coef, missing, 1)
    if not window.applied_known:
        coef, applied = np.full_like(coef, np.nan), math.nan
    bounded = columns.pop("coef", None)  # of modules; that of a parameter needs no column
    if bounded is not None:
        made = bounded.values.astype(np.float32)
        coef = np.where(bounded.present & np.isfinite(made), made, coef)
    if window.altered is not None:
        scalars = _with_factor(scalars, window, coef, total, applied)
    return Snapshot(
        optimizer=optimizer,
        step=window.step,
        sites=sites,
        norm=norms,
        calls=calls,
        coef=coef,
        total_norm=total,
        total_norm_applied=applied,
        loss_scale=None if window.loss_scale is None else host_value(window.loss_scale),
        columns=columns,
        scalars=scalars,
        micro=window.micro,
        provisional=window.provisional,
        coverage=coverage,
        histograms=_histograms(extras, count),
    )


class MeasuredStep(Protocol):
    """A step that was measured, on the host."""

    window: WindowNorms
    extras: Extras


class Assembled(NamedTuple):
    """The Snapshots of T steps, and their norms together: float32[T, K]."""

    snapshots: list[Snapshot]
    norm: NDArray[np.float32]


def assemble_many(
    sites: Sites,
    optimizer: int,
    steps: Sequence[MeasuredStep],
    scalars: Sequence[Mapping[str, float]],
    coverage: float,
) -> Assembled:
    """The Snapshots, as `assemble` makes them, of the first of these steps: with no gradient that was looked at twice.

    Of each, all K gradients have arrived, and nothing else has been measured but columns of them and of ranks.
    """
    norms = _norms_of_many(steps)
    totals = silently(_roots, norms)
    wide = [not (TINY < total < FLOAT32_MAX and applied < FLOAT32_MAX) for total, applied in totals]
    usual = wide.index(True) if True in wide else len(wide)
    count = len(steps[0].window.sites)
    missing = len(sites) - count
    narrow = np.array([raw for raw, _ in norms[:usual]]).reshape(usual, count).astype(np.float32)
    snapshots = [
        Snapshot(
            optimizer,
            step.window.step,
            sites,
            _pad(norm, missing) if missing else norm,
            _pad(step.window.calls, missing) if missing else step.window.calls,
            _pad(coefficients(raw, after), missing, 1) if missing else coefficients(raw, after),
            total,
            applied,
            None,
            _columns(step.extras, count, missing) if step.extras.params or step.extras.ranks else {},
            _with_factor(values, step.window, coefficients(raw, after), total, applied)
            if step.window.altered is not None
            else values,
            step.window.micro,
            coverage=coverage,
        )
        for step, values, norm, (raw, after), (total, applied) in zip(
            steps, scalars, narrow, norms, totals, strict=False
        )
    ]
    return Assembled(snapshots, narrow)


Norms = NDArray[np.float64]


def _with_factor(
    scalars: Mapping[str, float],
    window: WindowNorms,
    coef: NDArray[np.float32],
    total: float,
    applied: float,
) -> Mapping[str, float]:
    factor = common_factor(window.calls, coef, total, applied)
    if factor is None or not window.altered:
        return scalars
    return {**scalars, SCALED_BY: factor / window.altered}


def _norms_of_many(steps: Sequence[MeasuredStep]) -> list[tuple[Norms, Norms]]:
    """Norms of the first of these steps, before any clipping and as the optimizer got them; no suspicious ones."""
    add_up_all([step.window.raw for step in steps if isinstance(step.window.raw, CpuNorms)])
    found: list[tuple[Norms, Norms]] = []
    for step in steps:
        window = step.window
        raw, after = window.wait()
        miscounted = window.pruned is not None and not window.pruned.right
        if miscounted or window.provisional or window.raw.details or window.after.details:
            break
        found.append((raw, after))
    return found


def _roots(norms: Sequence[tuple[Norms, Norms]]) -> list[tuple[float, float]]:
    """The total norms of each, before any clipping and as the optimizer got it."""
    found = []
    for raw, after in norms:
        total = math.sqrt(np.dot(raw, raw))
        found.append((total, total if after is raw else math.sqrt(np.dot(after, after))))
    return found


def of_norms(optimizer: int, sites: Sites, window: WindowNorms, scalars: Mapping[str, float]) -> Snapshot:
    """The Snapshot of a step of which only the norms and scalars could be had, bit for bit those of `assemble`.

    Its coverage is 1: nothing else is claimed of it.
    """
    return assemble(optimizer, sites, window, Extras(), scalars, 1.0)


def _columns(extras: Extras, count: int, missing: int) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    _take_columns(columns, extras, count, missing)
    return columns


def as_float32(norms: NDArray[np.float64]) -> NDArray[np.float32]:
    """Norms as float32: Inf where they exceed it, and never 0 where they are not."""
    with np.errstate(over="ignore"):
        narrow = norms.astype(np.float32)
    if not narrow.all():
        narrow[(narrow == 0) & (norms > 0)] = TINY
    return narrow


def _total(norms: NDArray[np.float64], calls: NDArray[np.int32], details: Mapping[int, Detail]) -> float:
    kept = norms if not len(calls) or np.minimum.reduce(calls) > 0 else norms[calls > 0]
    # Silently: gradients changed since they were looked at may have squares beyond float64.
    return _safe_root(kept) if details else math.sqrt(silently(np.dot, kept, kept))


def _safe_root(norms: NDArray[np.float64]) -> float:
    """Root sum of squares, also of float64 norms whose squares exceed float64 or vanish in it."""
    largest = float(np.maximum.reduce(norms, initial=0.0))
    if not 0 < largest < math.inf:
        return largest
    scaled = norms / largest
    return largest * math.sqrt(np.dot(scaled, scaled))


@functools.lru_cache(maxsize=64)
def _untouched(count: int) -> NDArray[np.float32]:
    """Coefficients of 1; shared, so not to be written to."""
    ones = np.ones(count, np.float32)
    ones.flags.writeable = False
    return ones


def coefficients(raw: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32[K]: by what each of these norms was multiplied; 1 where that is not known, and of gradients of zeros."""
    if after is raw:
        return _untouched(len(raw))
    with np.errstate(all="ignore"):
        ratio = (after / raw).astype(np.float32)
    return np.where(np.isfinite(ratio), ratio, np.float32(1))


def _take_columns(columns: dict[str, Column], extras: Extras, count: int, missing: int) -> None:
    for pending in extras.params:
        for name, column in pending.columns().items():
            columns[name] = Column(_pad(column.values, missing), _pad(column.present, missing))
    for pending in extras.modules:
        for name, column in pending.columns().items():
            values, present = _lead(column.values, count), _lead(column.present, count)
            ranks = count + missing - len(values)
            columns[name] = Column(_pad(values, ranks), _pad(present, ranks))
    for measured in extras.ranks:
        for name, column in measured.columns().items():
            before = count + missing - len(column.values)
            columns[name] = Column(_lead(column.values, before), _lead(column.present, before))


def _histograms(extras: Extras, count: int) -> dict[int, Histogram]:
    """Histograms by site: those of `count` parameters, and of the modules behind them."""
    found = {} if extras.histograms is None else extras.histograms.histograms()
    if extras.module_histograms is not None:
        found |= {count + m: one for m, one in extras.module_histograms.histograms().items()}
    return found


def _suspicions(
    window: WindowNorms,
    details: Mapping[int, Detail],
    raw: NDArray[np.float64],
    norms: NDArray[np.float32],
    missing: int,
) -> dict[str, Column]:
    """`nonfinite`, `nan_count`, `inf_count`, `norm_overflow`; none of them while every norm is finite."""
    bad = ~np.isfinite(norms)
    if not bad.any():
        return {}
    names = ("nonfinite", "nan_count", "inf_count", "norm_overflow")
    found = {name: np.zeros(len(norms), np.float32) for name in names}
    for k in np.flatnonzero(bad):
        detail = details.get(int(k))
        if detail is not None and detail.nonfinite:
            found["nonfinite"][k], found["nan_count"][k] = detail.nonfinite, detail.nan
            found["inf_count"][k] = detail.inf
        elif detail is not None or np.isfinite(raw[k]):
            found["norm_overflow"][k] = 1
        else:  # read on a device, where elements are not counted: at least one
            found["nonfinite"][k] = 1
            found["nan_count" if np.isnan(raw[k]) else "inf_count"][k] = 1
    present = _pad(window.calls > 0, missing)
    return {name: Column(_pad(values, missing), present) for name, values in found.items()}


def _pad(values: NDArray, missing: int, fill: float = 0) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate([values, np.full(missing, fill, values.dtype)]) if missing else values


def _lead(values: NDArray, missing: int) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate([np.zeros(missing, values.dtype), values])
