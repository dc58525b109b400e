"""The per-site arrays of one step as an entry; those of several steps are `norms_block`.

Axes: S sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gradwatch.journal.payload import Array, Payload, encode_payload, of_length
from gradwatch.records.histogram import BINS, Histogram
from gradwatch.records.snapshot import Column

HISTOGRAM_SITES, HISTOGRAM_COUNTS = "histogram:sites", "histogram:counts"
Reason = Literal["first", "incident", "sample", "full", "firing"]


@dataclass(frozen=True, slots=True, eq=False)
class NormsEntry:
    """The per-site arrays of one step: `norm[S]`, `calls[S]`, `coef[S]`, the measured `columns` and `histograms`.

    `reason` says why this step was written: "first" (of the run), "incident" (around one), "sample" (one step
    in `every`), "full" (every step was asked for) or "firing" (a rule is firing). `every` is the cadence of
    samples at the time of writing. `firing` maps each firing rule to bool[S].
    """

    optimizer: int
    step: int
    sites_id: int
    reason: Reason
    every: int
    norm: NDArray[np.float32]
    calls: NDArray[np.int32]
    coef: NDArray[np.float32]
    columns: Mapping[str, Column] = field(default_factory=dict)
    firing: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    histograms: Mapping[int, Histogram] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The payload of this entry; `calls` and `coef` shrink to one element where all are bit-equal."""
        head = {
            "optimizer": self.optimizer,
            "step": self.step,
            "sites": self.sites_id,
            "reason": self.reason,
            "every": self.every,
            "columns": list(self.columns),
            "firing": list(self.firing),
        }
        arrays: dict[str, Array] = {
            "norm": np.asarray(self.norm, np.float32),
            "calls": _shrunk(np.asarray(self.calls, np.int32)),
            "coef": _shrunk(np.asarray(self.coef, np.float32)),
        }
        for name, (values, present) in self.columns.items():
            exact = values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)
            arrays |= {f"values:{name}": exact, f"present:{name}": present}
        if self.histograms:
            arrays |= _of_histograms(self.histograms)
        return encode_payload(
            "norms", head, arrays | {f"firing:{rule}": at for rule, at in self.firing.items()}
        )


def _of_histograms(histograms: Mapping[int, Histogram]) -> dict[str, Array]:
    """The sites that have one, and of each the zeros, the octaves and the number of NaN and Inf."""
    counts = [np.concatenate([[one.zeros], one.counts, [one.nonfinite]]) for one in histograms.values()]
    return {
        HISTOGRAM_SITES: np.fromiter(histograms, np.int32, len(histograms)),
        HISTOGRAM_COUNTS: np.concatenate(counts).astype(np.int64),
    }


def _decode_histograms(arrays: Mapping[str, Array], size: int) -> dict[int, Histogram]:
    sites = arrays.get(HISTOGRAM_SITES)
    if sites is None:
        return {}
    if len(sites) and not 0 <= sites.min() <= sites.max() < size:
        raise ValueError("a histogram of a site that is not there")
    rows = of_length(arrays[HISTOGRAM_COUNTS], len(sites) * (BINS + 2)).reshape(-1, BINS + 2)
    return {
        int(site): Histogram(int(row[0]), row[1:-1], int(row[-1]))
        for site, row in zip(sites, rows, strict=True)
    }


def _shrunk(array: Array) -> Array:
    bits = array.view(np.uint32)  # NaN equals itself, -0.0 differs from 0.0
    return array[:1] if len(bits) and bool((bits == bits[0]).all()) else array


def decode_norms(payload: Payload) -> NormsEntry:
    head, arrays = payload.fields, payload.arrays
    size = len(arrays["norm"])
    calls, coef = (
        np.broadcast_to(arrays[name], size) if len(arrays[name]) == 1 else of_length(arrays[name], size)
        for name in ("calls", "coef")
    )
    columns = {
        name: Column(of_length(arrays[f"values:{name}"], size), of_length(arrays[f"present:{name}"], size))
        for name in head["columns"]
    }
    firing = {rule: of_length(arrays[f"firing:{rule}"], size) for rule in head["firing"]}
    if head["reason"] not in get_args(Reason):
        raise ValueError(f"unknown reason {head['reason']!r}")
    return NormsEntry(
        optimizer=int(head["optimizer"]),
        step=int(head["step"]),
        sites_id=int(head["sites"]),
        reason=head["reason"],
        every=int(head["every"]),
        norm=arrays["norm"],
        calls=calls,
        coef=coef,
        columns=columns,
        firing=firing,
        histograms=_decode_histograms(arrays, size),
    )
