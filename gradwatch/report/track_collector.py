"""Collects the steps and norms of one optimizer into a `Track`, entry by entry, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gradwatch.journal import NormsEntry, StepRow, StepsEntry
from gradwatch.records.snapshot import Sites
from gradwatch.report.step_buckets import Array, Counts, Envelope, StepAxis
from gradwatch.report.track import COUNTS, CURVES, Axis, Curve, Grid, Parameters, Track

MOST_BUCKETS = 1024
MOST_GRID_BUCKETS = 512
MOST_GRID_CELLS = 1 << 23
"""Buckets times parameters: 75 MB of grids."""
FEWEST_GRID_BUCKETS = 64
TOGETHER = 128
"""Steps whose norms are taken in at once: one call of numpy costs as much as a thousand values."""
GRIDS = ("norm", "update_ratio")
_SMALLER = 1 - 1e-6
_EVERYTHING = np.arange(len(CURVES))
_OWN: dict[str, Callable[[StepRow], float | None]] = {
    "total_norm": lambda row: row.total_norm,
    "total_norm_applied": lambda row: None if row.decision.skip else row.total_norm_applied,
    "loss_scale": lambda row: row.loss_scale,
    "step_seconds": lambda row: row.step_seconds,
    "overhead_seconds": lambda row: row.overhead_seconds,
}


class TrackCollector:
    """Takes in the entries of one optimizer of one journal."""

    def __init__(self, attempt: int, optimizer: int) -> None:
        self._attempt, self._optimizer = attempt, optimizer
        self._axis = StepAxis(MOST_BUCKETS)
        self._curves = Envelope(self._axis, len(CURVES))
        self._counts = Counts(self._axis, len(COUNTS))
        self._parameters = ParameterCollector()
        self._steps = 0
        self._first, self._last = -1, -1
        self._began, self._ended = 0.0, 0.0
        self._own_seconds = self._seconds = 0.0
        self._pruned = False

    def take_steps(self, entry: StepsEntry) -> None:
        """Add scalars."""
        rows = entry.rows
        if not rows:
            return
        steps = [row.step for row in rows]
        self._began = self._began or rows[0].wall_time
        self._ended = rows[-1].wall_time
        self._first = min(steps) if self._first < 0 else min(self._first, *steps)
        self._last = max(self._last, *steps)
        self._steps += len(rows)
        self._pruned |= entry.every > 1
        self._own_seconds += sum(filter(math.isfinite, (row.overhead_seconds for row in rows)))
        self._seconds += sum(filter(math.isfinite, (row.step_seconds or 0.0 for row in rows)))
        slots = self._axis.slots(steps)
        given = [
            [get(row) for row in rows]
            if (get := _OWN.get(name)) is not None
            else [row.scalars.get(name) for row in rows]
            for name in CURVES
        ]
        values = np.array(given, np.float64).T
        present = np.array([[value is not None for value in column] for column in given]).T
        self._curves.add(slots, values, present, _EVERYTHING)
        self._counts.add(slots, np.array([_flags(row) for row in rows], np.int64))

    def take_norms(self, entry: NormsEntry, sites: Sites) -> None:
        """Add norms of parameters."""
        self._parameters.take(entry, sites)

    def track(self) -> Track:
        """The track so far."""
        count = self._axis.count
        return Track(
            self._attempt,
            self._optimizer,
            self._steps,
            self._first,
            self._last,
            Axis(tuple(self._axis.starts), self._axis.width),
            {
                name: curve
                for at, name in enumerate(CURVES)
                if (curve := _curve(self._curves, at, count)) is not None
            },
            {name: self._counts.sums[:count, at] for at, name in enumerate(COUNTS)},
            self._parameters.parameters(),
            self._pruned,
            self._began,
            self._ended,
            self._own_seconds,
            self._seconds,
        )


NO_NORM = -np.inf, -1


class ParameterCollector:
    """Takes in the norms of the parameters of one optimizer, whose sites may change while it trains."""

    def __init__(self) -> None:
        self._axis: StepAxis | None = None
        self._grids: dict[str, Envelope] = {}
        self._index: dict[str, int] = {}
        self._about: dict[str, tuple[str, int, int]] = {}
        self._sites: Sites | None = None
        self._chosen = np.zeros(0, np.int64)
        self._columns = np.zeros(0, np.int64)
        self._waiting: list[NormsEntry] = []
        self._last: dict[int, float] = {}
        self._last_step = -1
        self._largest: dict[int, tuple[float, int]] = {}  # with its step
        self._recorded = 0

    def take(self, entry: NormsEntry, sites: Sites) -> None:
        """Add the norms of one step."""
        if sites is not self._sites:
            self._flush()
            self._bind(sites)
        if len(entry.norm) == len(sites):  # else the sites it was measured on are not the ones at hand
            self._waiting.append(entry)
            if len(self._waiting) >= TOGETHER:
                self._flush()

    def _bind(self, sites: Sites) -> None:
        self._sites = sites
        self._chosen = np.array([at for at, kind in enumerate(sites.kinds) if kind == "param"], np.int64)
        groups = sites.groups if len(sites.groups) == len(sites) else ("",) * len(sites)
        for at in self._chosen.tolist():
            name = sites.names[at]
            self._index.setdefault(name, len(self._index))
            self._about[name] = groups[at], int(sites.depths[at]), int(sites.numels[at])
        self._columns = np.array([self._index[sites.names[at]] for at in self._chosen.tolist()], np.int64)
        for grid in self._grids.values():
            grid.widen(len(self._index))

    def _flush(self) -> None:
        entries, self._waiting = self._waiting, []
        if not entries or not len(self._chosen):
            return
        if self._axis is None:
            most = MOST_GRID_CELLS // len(self._index)
            self._axis = StepAxis(max(FEWEST_GRID_BUCKETS, min(MOST_GRID_BUCKETS, most)))
        slots = self._axis.slots([entry.step for entry in entries])
        calls = np.array([entry.calls for entry in entries])[:, self._chosen] > 0
        norms = np.array([entry.norm for entry in entries])[:, self._chosen]
        self._add("norm", slots, norms, calls)
        self._recorded += len(entries)
        latest = int(np.argmax([entry.step for entry in entries]))
        self._last_step = max(self._last_step, entries[latest].step)
        shown = np.where(calls[latest], norms[latest], np.nan)
        self._last |= dict(zip(self._columns.tolist(), shown.tolist(), strict=True))
        finite = np.where(calls & np.isfinite(norms), norms, -np.inf)
        for at, k, norm in zip(
            self._columns.tolist(), finite.argmax(0).tolist(), finite.max(0).tolist(), strict=True
        ):
            if norm > self._largest.get(at, NO_NORM)[0]:
                self._largest[at] = norm, entries[k].step
        for name in GRIDS[1:]:
            self._add_column(name, entries, slots)

    def _add_column(self, name: str, entries: Sequence[NormsEntry], slots: Array) -> None:
        having = [at for at, entry in enumerate(entries) if name in entry.columns]
        if having:
            columns = [entries[at].columns[name] for at in having]
            with np.errstate(over="ignore"):  # beyond float32 it is as good as infinite
                values = np.array([each.values for each in columns], np.float32)[:, self._chosen]
            present = np.array([each.present for each in columns])[:, self._chosen]
            self._add(name, slots[having], values, present)

    def _add(self, name: str, slots: Array, values: Array, present: Array) -> None:
        assert self._axis is not None
        if name not in self._grids:
            self._grids[name] = Envelope(self._axis, len(self._index), np.float32)
        self._grids[name].add(slots, values, present, self._columns)

    def parameters(self) -> Parameters:
        """The parameters so far, in the order of their depth."""
        self._flush()
        if self._axis is None:
            return Parameters()
        names = sorted(self._index, key=lambda name: (self._about[name][1], self._index[name]))
        order = np.array([self._index[name] for name in names], np.int64)
        about = [self._about[name] for name in names]
        count = self._axis.count
        grids = {
            name: Grid(
                _known(grid.low[:count][:, order]),
                _known(grid.high[:count][:, order]),
                grid.bad[:count][:, order],
            )
            for name, grid in self._grids.items()
        }
        last = np.array([self._last.get(at, np.nan) for at in order.tolist()], np.float32)
        return Parameters(
            tuple(names),
            tuple(group for group, _, _ in about),
            tuple(depth for _, depth, _ in about),
            tuple(numel for _, _, numel in about),
            Axis(tuple(self._axis.starts), self._axis.width),
            grids,
            last,
            self._last_step,
            self._recorded,
            np.array([self._largest.get(at, NO_NORM)[1] for at in order.tolist()], np.int64),
        )


def _flags(row: StepRow) -> tuple[bool, ...]:
    """One flag for each of COUNTS."""
    decision = row.decision
    clipped = any(order.changed_gradients for order in decision.orders)
    smaller = not decision.skip and row.total_norm_applied < row.total_norm * _SMALLER
    rejected = bool(row.scalars.get("scaler_skip"))
    return True, decision.skip, clipped, smaller and not clipped, rejected, row.provisional


def _curve(envelope: Envelope, column: int, count: int) -> Curve | None:
    """A column of an envelope; None where it never had a value."""
    low, high = (_known(part[:count, column]) for part in (envelope.low, envelope.high))
    bad = envelope.bad[:count, column]
    return Curve(low, high, bad) if np.isfinite(low).any() or bad.any() else None


def _known(bounds: Array) -> Array:
    """Bounds with NaN where there is no value."""
    return np.where(np.isfinite(bounds), bounds, np.nan)


def tracks(collectors: Iterable[TrackCollector]) -> tuple[Track, ...]:
    """The tracks that hold any step, the longest first; equally long ones by process and optimizer."""
    found = [each.track() for each in collectors]
    order = sorted(found, key=lambda each: (-each.steps, each.attempt, each.optimizer))
    return tuple(each for each in order if each.steps)
