"""Entries: what a journal says, each kind a typed record with its encoding and decoding side by side.

Axes: S sites, n steps of one batch. An entry stands on its own: it needs at most the `SitesEntry` it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from gradwatch.journal.columnar_steps import StepsEntry, decode_steps
from gradwatch.journal.payload import Array, Payload, decode_payload, encode_payload
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.histogram import BINS, Histogram
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Column, Sites
from gradwatch.runtime.json_numbers import json_number

FORMAT = 1
HISTOGRAM_SITES, HISTOGRAM_COUNTS = "histogram:sites", "histogram:counts"
Reason = Literal["first", "incident", "sample", "full", "firing"]


@dataclass(frozen=True, slots=True)
class RunEntry:
    """First in every file: who wrote it. `segment` counts the files of one journal from 0 (the head).

    `format` is the version of the entries; a reader skips kinds it does not know and ignores unknown keys.
    """

    run: RunInfo
    segment: int = 0
    params: str = "sampled"
    max_bytes: int = 0
    format: int = FORMAT

    def encode(self) -> bytes:
        """The payload of this entry."""
        document = asdict(self)
        document["run"]["start_time"] = json_number(self.run.start_time)
        return encode_payload("run", document, {})


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_DOCUMENTS[kind])


@dataclass(frozen=True, slots=True, eq=False)
class SitesEntry:
    """The sites that later entries of this file mean by `sites_id`; a new one whenever they change."""

    sites_id: int
    optimizer: int
    sites: Sites


def encode_sites(sites_id: int, optimizer: int, sites: Sites) -> bytes:
    """Names travel as UTF-8 in the blob, lone surrogates included: 20,000 of them as JSON hold the GIL."""
    names = [name.encode("utf-8", "surrogatepass") for name in sites.names]
    kinds, kind_index = _indexed(sites.kinds)
    groups, group_index = _indexed(sites.groups)
    head = {"sites": sites_id, "optimizer": optimizer, "kinds": kinds, "groups": groups}
    arrays = {
        "lengths": np.array([len(name) for name in names], "<i4"),
        "names": np.frombuffer(b"".join(names), "u1"),
        "kind_index": kind_index,
        "group_index": group_index,
        "numels": sites.numels.astype("<i8"),
        "ndims": sites.ndims.astype("<i8"),
        "depths": sites.depths.astype("<i8"),
    }
    return encode_payload("sites", head, arrays)


def _indexed(labels: Sequence[str]) -> tuple[list[str], NDArray[np.int32]]:
    distinct = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    return list(distinct), np.fromiter((distinct[label] for label in labels), np.int32, len(labels))


def _decode_sites(payload: Payload) -> SitesEntry:
    head, arrays = payload.fields, payload.arrays
    ends = np.cumsum(arrays["lengths"], dtype=np.int64)
    blob = arrays["names"].tobytes()
    starts = ends - arrays["lengths"]
    if arrays["lengths"].min(initial=0) < 0 or (ends[-1] if len(ends) else 0) != len(blob):
        raise ValueError("the names do not fill their blob")
    names = tuple(
        blob[start:end].decode("utf-8", "surrogatepass") for start, end in zip(starts, ends, strict=True)
    )
    sites = Sites(
        names=names,
        kinds=_labels(head["kinds"], arrays["kind_index"]),
        numels=_of_length(arrays["numels"], len(names)),
        ndims=_of_length(arrays["ndims"], len(names)),
        depths=_of_length(arrays["depths"], len(names)),
        groups=_labels(head["groups"], arrays["group_index"]),
    )
    if len(sites.kinds) != len(names) or len(sites.groups) not in (0, len(names)):
        raise ValueError("not one kind and one group per site")
    return SitesEntry(int(head["sites"]), int(head["optimizer"]), sites)


def _labels(distinct: Sequence[str], index: Array) -> tuple[str, ...]:
    if index.min(initial=0) < 0:
        raise ValueError("a label is counted from 0")
    return tuple(str(distinct[at]) for at in index)


def _of_length(array: Array, length: int) -> Array:
    if len(array) != length:
        raise ValueError(f"an array of {len(array)} elements where {length} are due")
    return array


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
    rows = _of_length(arrays[HISTOGRAM_COUNTS], len(sites) * (BINS + 2)).reshape(-1, BINS + 2)
    return {
        int(site): Histogram(int(row[0]), row[1:-1], int(row[-1]))
        for site, row in zip(sites, rows, strict=True)
    }


def _shrunk(array: Array) -> Array:
    bits = array.view(np.uint32)  # NaN equals itself, -0.0 differs from 0.0
    return array[:1] if len(bits) and bool((bits == bits[0]).all()) else array


def _decode_norms(payload: Payload) -> NormsEntry:
    head, arrays = payload.fields, payload.arrays
    size = len(arrays["norm"])
    calls, coef = (
        np.broadcast_to(arrays[name], size) if len(arrays[name]) == 1 else _of_length(arrays[name], size)
        for name in ("calls", "coef")
    )
    columns = {
        name: Column(_of_length(arrays[f"values:{name}"], size), _of_length(arrays[f"present:{name}"], size))
        for name in head["columns"]
    }
    firing = {rule: _of_length(arrays[f"firing:{rule}"], size) for rule in head["firing"]}
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


@dataclass(frozen=True, slots=True)
class EventsEntry:
    """The rule transitions of one step and the causes found. `number` counts these entries over the whole journal.

    A number may appear twice, in two files, where a disk failed between write and fsync: the same entry.
    """

    number: int
    optimizer: int
    step: int
    wall_time: float
    events: tuple[Event, ...]
    findings: tuple[Finding, ...] = ()

    def encode(self) -> bytes:
        """The payload of this entry."""
        head = {
            "number": self.number,
            "optimizer": self.optimizer,
            "step": self.step,
            "wall_time": json_number(self.wall_time),
            "events": [_event_document(event) for event in self.events],
            "findings": [finding.to_dict() for finding in self.findings],
        }
        return encode_payload("events", head, {})


def _event_document(event: Event) -> dict[str, Any]:
    document = {each.name: getattr(event, each.name) for each in fields(Event)}
    document |= {name: json_number(document[name]) for name in ("value", "score", "threshold")}
    return document | {"labels": {str(key): str(value) for key, value in event.labels.items()}}


@dataclass(frozen=True, slots=True)
class LostEntry:
    """Losses before this point: counts since the last such entry.

    `queue` records the full queue turned away; `scalars` steps and `norms` per-site arrays the disk refused;
    `events` rule transitions given up; `rotated` bytes of old files deleted to stay within the cap.
    `first_step`, `last_step` bound the steps concerned (-1 = none).
    """

    queue: int = 0
    scalars: int = 0
    norms: int = 0
    events: int = 0
    rotated: int = 0
    first_step: int = -1
    last_step: int = -1

    def __bool__(self) -> bool:
        return bool(self.queue or self.scalars or self.norms or self.events or self.rotated)

    def __or__(self, other: LostEntry) -> LostEntry:
        """Both losses together."""
        known = [step for step in (self.first_step, other.first_step) if step >= 0]
        return LostEntry(
            queue=self.queue + other.queue,
            scalars=self.scalars + other.scalars,
            norms=self.norms + other.norms,
            events=self.events + other.events,
            rotated=self.rotated + other.rotated,
            first_step=min(known, default=-1),
            last_step=max(self.last_step, other.last_step),
        )

    def encode(self) -> bytes:
        """The payload of this entry."""
        return encode_payload("lost", asdict(self), {})


@dataclass(frozen=True, slots=True)
class EndEntry:
    """Last of a journal that was closed in order; `steps` is how many records it was given.

    `ended` says how the process ended ("finished", "stopped" by a rule or by Ctrl-C, "failed" by an exception; ""
    where it is not known), `account` is `gradwatch.account.Account.to_dict()`, empty in journals of earlier versions.
    """

    steps: int
    ended: str = ""
    account: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The payload of this entry."""
        return encode_payload("end", asdict(self), {})


Entry = RunEntry | SitesEntry | StepsEntry | NormsEntry | EventsEntry | LostEntry | EndEntry

_ARRAYS: dict[str, Callable[[Payload], Entry]] = {
    "sites": _decode_sites,
    "steps": decode_steps,
    "norms": _decode_norms,
}
_DOCUMENTS = {"run": RunEntry, "events": EventsEntry, "lost": LostEntry, "end": EndEntry}


def decode_entry(data: bytes) -> Entry | None:
    """The entry in a frame's payload; None for a kind this version does not know.

    `ValueError` where the content makes no sense, whoever wrote it.
    """
    payload = decode_payload(data)
    try:
        if payload.kind in _ARRAYS:
            return _ARRAYS[payload.kind](payload)
        if payload.kind in _DOCUMENTS:
            # Checks every type; keys of a newer gradwatch are ignored.
            entry: Entry = _adapter(payload.kind).validate_python(dict(payload.fields))
            return entry
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a {payload.kind} entry: {error!r}") from error
    return None
