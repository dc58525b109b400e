"""The scalars of many steps in one entry: one column per quantity, so that a million steps fit the cap.

Axes: n steps of one optimizer, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.journal.payload import Array, Payload, encode_payload
from gradwatch.records.decision import Decision, Order
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.json_numbers import json_number

_PROVISIONAL, _SKIP, _STOP = 1, 2, 4
_FLOATS = ("wall_time", "overhead_seconds", "total_norm", "total_norm_applied", "coverage")
_LONGEST_SITE = 500
"""Characters of a parameter's name with an order, at every step that has one; events hold the whole of it."""
_OPTIONAL = ("step_seconds", "loss_scale", "max_norm")
_NOTHING = Decision()


class StepRow(NamedTuple):
    """The scalars of one step. `groups` is the root sum of squares of `norm` over each label group."""

    step: int
    micro: int
    provisional: bool
    wall_time: float
    overhead_seconds: float
    total_norm: float
    total_norm_applied: float
    coverage: float
    step_seconds: float | None
    loss_scale: float | None
    scalars: Mapping[str, float]
    groups: Mapping[str, float]
    decision: Decision


class GroupNorms:
    """Norms by label group for fixed sites: one pass over S values whatever the number of groups."""

    def __init__(self, sites: Sites) -> None:
        labels = sites.groups if len(sites.groups) == len(sites) else ("",) * len(sites)
        names = dict.fromkeys(
            label for label, kind in zip(labels, sites.kinds, strict=True) if label and kind == "param"
        )
        self._names = tuple(names)
        position = {name: at for at, name in enumerate(names)}
        rest = len(names)
        pairs = zip(labels, sites.kinds, strict=True)
        self._index = np.array(
            [position.get(label, rest) if kind == "param" else rest for label, kind in pairs], int
        )

    def __call__(self, norm: NDArray[np.float32], calls: NDArray[np.int32]) -> list[dict[str, float]]:
        """Root sum of squares in float64 per group of each of n steps, over the sites that had a gradient.

        `norm[n, S]`, `calls[n, S]` (> 0: the site had one).
        """
        if not self._names:
            return [{} for _ in norm]
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.square(norm, dtype=np.float64)
        squares[calls <= 0] = 0.0
        groups = len(self._names) + 1
        index = self._index + groups * np.arange(len(norm))[:, None]
        sums = np.bincount(index.ravel(), squares.ravel(), len(norm) * groups).reshape(-1, groups)
        return [dict(zip(self._names, each, strict=False)) for each in np.sqrt(sums).tolist()]


def step_row(record: Record, groups: Mapping[str, float]) -> StepRow:
    """The row that a journal keeps of a Record for every step."""
    snapshot = record.snapshot
    return StepRow(
        step=snapshot.step,
        micro=snapshot.micro,
        provisional=snapshot.provisional,
        wall_time=record.wall_time,
        overhead_seconds=record.overhead_seconds,
        total_norm=snapshot.total_norm,
        total_norm_applied=snapshot.total_norm_applied,
        coverage=snapshot.coverage,
        step_seconds=record.step_seconds,
        loss_scale=snapshot.loss_scale,
        scalars=snapshot.scalars,
        groups=groups,
        decision=record.decision,
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepsEntry:
    """Scalars of n steps of one optimizer; `every` is their cadence (1: every step is written).

    `rows` are in the order they were recorded.
    """

    optimizer: int
    sites_id: int
    rows: Sequence[StepRow]
    every: int = 1

    def encode(self) -> bytes:
        """The payload of this entry: about 60 bytes a step, 9 more per scalar and per group."""
        rows = self.rows
        column = dict(zip(StepRow._fields, zip(*rows, strict=True), strict=True))
        flags = [
            row.provisional * _PROVISIONAL + row.decision.skip * _SKIP + row.decision.stop * _STOP
            for row in rows
        ]
        arrays: dict[str, Array] = {
            "step": np.array(column["step"], np.int64),
            "micro": np.array(column["micro"], np.int32),
            "flags": np.array(flags, np.uint8),
        }
        arrays |= {name: np.array(column[name], np.float64) for name in _FLOATS}
        arrays |= _optional("step_seconds", column["step_seconds"])
        arrays |= _optional("loss_scale", column["loss_scale"])
        arrays |= _optional("max_norm", [row.decision.max_norm for row in rows])
        scalars = sorted(set().union(*column["scalars"]))
        groups = sorted(set().union(*column["groups"]))
        head = {
            "optimizer": self.optimizer,
            "sites": self.sites_id,
            "every": self.every,
            "scalars": scalars,
            "groups": groups,
            "orders": {str(at): _orders(row.decision) for at, row in enumerate(rows) if row.decision.orders},
        }
        for name in scalars:
            arrays |= _optional(f"scalar:{name}", [each.get(name) for each in column["scalars"]])
        for name in groups:
            arrays |= _optional(f"group:{name}", [each.get(name) for each in column["groups"]])
        return encode_payload("steps", head, arrays)


def _optional(name: str, values: Sequence[float | None]) -> dict[str, Array]:
    """A column of float64 with, where any value is absent, its bits of presence; nothing where all are."""
    absent = values.count(None)
    if absent == len(values):
        return {}
    if not absent:
        return {name: np.array(values, np.float64)}
    present = np.array([value is not None for value in values], bool)
    filled = [0.0 if value is None else value for value in values]
    return {name: np.array(filled, np.float64), f"{name}?": present}


def _orders(decision: Decision) -> list[list[object]]:
    """Rule, action, shadow, site, count, before, after, coefficient of each, by rule and action."""
    ordered = sorted(decision.orders, key=lambda order: (order.rule, order.action, order.shadow, order.site))
    return [
        [
            *(order.rule, order.action, order.shadow, order.site[:_LONGEST_SITE], order.count),
            *(None if value is None else json_number(value) for value in (order.before, order.after)),
            None if order.coefficient is None else json_number(order.coefficient),
        ]
        for order in ordered
    ]


def decode_steps(payload: Payload) -> StepsEntry:
    """The inverse of `StepsEntry.encode`; `ValueError`, `LookupError` or `TypeError` for anything else."""
    head, arrays = payload.fields, payload.arrays
    size = len(arrays["step"])
    scalars = _by_row("scalar", head["scalars"], arrays, size)
    groups = _by_row("group", head["groups"], arrays, size)
    optional = {name: _absent_or(name, arrays, size) for name in _OPTIONAL}
    # As lists: an element of an array is many times slower to take than one of a list.
    plain: dict[str, list[Any]] = {
        name: list(map(kind, _column(name, arrays, size).tolist()))
        for kind, names in ((int, ("step", "micro", "flags")), (float, _FLOATS))
        for name in names
    }
    orders = head["orders"]
    decisions = [
        _NOTHING
        if not flags & ~_PROVISIONAL and most is None and str(at) not in orders
        else _decision(flags, most, orders.get(str(at), ()))
        for at, (flags, most) in enumerate(zip(plain["flags"], optional["max_norm"], strict=True))
    ]
    columns: dict[str, list[Any]] = {
        **plain,
        "provisional": [bool(flags & _PROVISIONAL) for flags in plain["flags"]],
        "step_seconds": optional["step_seconds"],
        "loss_scale": optional["loss_scale"],
        "scalars": scalars,
        "groups": groups,
        "decision": decisions,
    }
    rows = list(map(StepRow, *(columns[name] for name in StepRow._fields)))
    return StepsEntry(int(head["optimizer"]), int(head["sites"]), rows, int(head["every"]))


def _column(name: str, arrays: Mapping[str, Array], size: int) -> Array:
    if len(arrays[name]) != size:
        raise ValueError(f"column {name!r} has {len(arrays[name])} rows, not {size}")
    return arrays[name]


def _absent_or(name: str, arrays: Mapping[str, Array], size: int) -> list[float | None]:
    if name not in arrays:
        return [None] * size
    values = _column(name, arrays, size).tolist()
    if f"{name}?" not in arrays:
        return list(values)
    present = _column(f"{name}?", arrays, size).tolist()
    return [value if there else None for value, there in zip(values, present, strict=True)]


def _by_row(
    prefix: str, names: Iterable[str], arrays: Mapping[str, Array], size: int
) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = [{} for _ in range(size)]
    for name in names:
        for row, value in zip(rows, _absent_or(f"{prefix}:{name}", arrays, size), strict=True):
            if value is not None:
                row[name] = value
    return rows


def _decision(flags: int, max_norm: float | None, orders: Iterable[Sequence[object]]) -> Decision:
    found = frozenset(map(_order, orders))
    return Decision(bool(flags & _SKIP), bool(flags & _STOP), max_norm, found)


def _order(values: Sequence[object]) -> Order:
    """The inverse of `_orders`; what was written before orders had numbers holds the first three only."""
    rule, action, shadow, *more = values
    if not more:
        return Order(str(rule), str(action), bool(shadow))
    site, count, before, after, coefficient = more
    numbers = [None if value is None else float(str(value)) for value in (before, after, coefficient)]
    return Order(str(rule), str(action), bool(shadow), str(site), int(str(count)), *numbers)
