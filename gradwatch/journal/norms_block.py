"""The per-site arrays of several steps as one entry: what one step has in common with the next is written once.

Axes: n steps of one optimizer, S sites. A block reads back as n `NormsEntry`, so only the files know of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gradwatch.journal.norms_entry import NormsEntry, Reason
from gradwatch.journal.payload import Array, Payload, encode_payload, of_length
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Column

KIND = "norms_block"
_UNSIGNED = {1: np.uint8, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, eq=False)
class NormsBlock:
    """The arrays of `steps[n]`, each [n, S]: "norm", "calls", "coef"; "values:NAME" and "present:NAME" of each of
    `columns`, "firing:RULE" of each rule of `firing`. All n steps have the same columns and firing rules, and none
    has histograms. `reason` and `every` are those of each step, as `NormsEntry` says.
    """

    optimizer: int
    sites_id: int
    reason: Reason
    every: int
    columns: tuple[str, ...]
    firing: tuple[str, ...]
    steps: NDArray[np.int64]
    arrays: Mapping[str, Array]

    def encode(self) -> bytes:
        """The payload of this entry; along an axis where all of an array is bit-equal, one of it is written."""
        small = {name: _shrunk(array) for name, array in self.arrays.items() if name != "norm"}
        head = {
            "optimizer": self.optimizer,
            "sites": self.sites_id,
            "reason": self.reason,
            "every": self.every,
            "columns": self.columns,
            "firing": self.firing,
            "shapes": {name: array.shape for name, array in small.items()},
        }
        flat = {name: array.ravel() for name, array in small.items()}
        return encode_payload(KIND, head, {"steps": self.steps, "norm": self.arrays["norm"].ravel(), **flat})

    def at_cadence(self, every: int) -> NormsBlock | None:
        """The steps of a rarer cadence, saying so; None where it has none here."""
        kept = self.steps % every == 0
        if not kept.any():
            return None
        arrays = {name: array[kept] for name, array in self.arrays.items()}
        return replace(self, every=every, steps=self.steps[kept], arrays=arrays)

    def entries(self) -> list[NormsEntry]:
        """One entry for each step."""
        arrays = self.arrays
        return [
            NormsEntry(
                optimizer=self.optimizer,
                step=step,
                sites_id=self.sites_id,
                reason=self.reason,
                every=self.every,
                norm=arrays["norm"][at],
                calls=arrays["calls"][at],
                coef=arrays["coef"][at],
                columns={
                    name: Column(arrays[f"values:{name}"][at], arrays[f"present:{name}"][at])
                    for name in self.columns
                },
                firing={rule: arrays[f"firing:{rule}"][at] for rule in self.firing},
            )
            for at, step in enumerate(self.steps.tolist())
        ]


def block_arrays(records: Sequence[Record], columns: Sequence[Mapping[str, Column]]) -> dict[str, Array]:
    """The arrays of a block of these records, with `columns` of each; `ValueError` where they are not of one length."""
    snapshots = [record.snapshot for record in records]
    firing = [record.verdict.firing for record in records]
    # `np.array` of arrays takes a quarter of the time of `np.stack`, and refuses different lengths, too.
    arrays: dict[str, Array] = {
        "norm": np.array([each.norm for each in snapshots], np.float32),
        "calls": np.array([each.calls for each in snapshots], np.int32),
        "coef": np.array([each.coef for each in snapshots], np.float32),
    }
    for name in columns[0]:
        values = np.array([each[name].values for each in columns])
        exact = values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)
        arrays |= {
            f"values:{name}": exact,
            f"present:{name}": np.array([each[name].present for each in columns]),
        }
    return arrays | {f"firing:{rule}": np.array([each[rule] for each in firing]) for rule in firing[0]}


def decode_block(payload: Payload) -> NormsBlock:
    """The inverse of `NormsBlock.encode`; `ValueError`, `LookupError` or `TypeError` for anything else."""
    head, arrays = payload.fields, payload.arrays
    steps, norm = arrays["steps"], arrays["norm"]
    if not len(steps) or head["reason"] not in get_args(Reason):
        raise ValueError(f"{len(steps)} steps written because of {head['reason']!r}")
    size = len(norm) // len(steps)
    shape = len(steps), size
    columns, firing = tuple(head["columns"]), tuple(head["firing"])
    names = ["calls", "coef", *(f"{part}:{name}" for name in columns for part in ("values", "present"))]
    names += [f"firing:{rule}" for rule in firing]
    return NormsBlock(
        optimizer=int(head["optimizer"]),
        sites_id=int(head["sites"]),
        reason=head["reason"],
        every=int(head["every"]),
        columns=columns,
        firing=firing,
        steps=steps,
        arrays={
            "norm": of_length(norm, len(steps) * size).reshape(shape),
            **{name: _expanded(arrays[name], head["shapes"][name], shape) for name in names},
        },
    )


def _shrunk(array: Array) -> Array:
    """First slice of an axis along which all is bit-equal: NaN equals itself, -0.0 differs from 0.0."""
    if not array.size:
        return array
    bits = array.view(_UNSIGNED[array.itemsize])
    if bool((bits == bits[:, :1]).all()):
        array, bits = array[:, :1], bits[:, :1]
    return array[:1] if bool((bits == bits[:1]).all()) else array


def _expanded(array: Array, shape: Sequence[Any], full: tuple[int, int]) -> Array:
    return np.broadcast_to(array.reshape(tuple(shape)), full)
