"""Entries: what a journal says, each kind a typed record with its encoding and decoding side by side.

Axes: S sites, n steps of one batch. An entry stands on its own: it needs at most the `SitesEntry` it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.journal.columnar_steps import StepsEntry, decode_steps
from gradwatch.journal.norms_block import KIND as NORMS_BLOCK
from gradwatch.journal.norms_block import decode_block
from gradwatch.journal.norms_entry import NormsEntry, decode_norms
from gradwatch.journal.payload import Array, Payload, decode_payload, encode_payload, of_length
from gradwatch.records.event import Event
from gradwatch.records.finding import Finding
from gradwatch.records.run_info import RunInfo
from gradwatch.records.saved_optimizer_state import SavedState
from gradwatch.records.snapshot import Sites
from gradwatch.runtime.json_numbers import json_number

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT = 1


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
    from pydantic import TypeAdapter  # 0.1 s, and who only writes a journal needs none

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
        numels=of_length(arrays["numels"], len(names)),
        ndims=of_length(arrays["ndims"], len(names)),
        depths=of_length(arrays["depths"], len(names)),
        groups=_labels(head["groups"], arrays["group_index"]),
    )
    if len(sites.kinds) != len(names) or len(sites.groups) not in (0, len(names)):
        raise ValueError("not one kind and one group per site")
    return SitesEntry(int(head["sites"]), int(head["optimizer"]), sites)


def _labels(distinct: Sequence[str], index: Array) -> tuple[str, ...]:
    if index.min(initial=0) < 0:
        raise ValueError("a label is counted from 0")
    return tuple(str(distinct[at]) for at in index)


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
            "events": [event_document(event) for event in self.events],
            "findings": [finding.to_dict() for finding in self.findings],
        }
        return encode_payload("events", head, {})


def event_document(event: Event) -> dict[str, Any]:
    """An Event as JSON has it; numbers that are not finite as strings."""
    document = {each.name: getattr(event, each.name) for each in fields(Event)}
    document |= {name: json_number(document[name]) for name in ("value", "score", "threshold")}
    return document | {"labels": {str(key): str(value) for key, value in event.labels.items()}}


@dataclass(frozen=True, slots=True)
class SavedStatesEntry:
    """States that the script took of its optimizers, `taken` in all so far, of which `healthy` are known to be healthy.

    `states` are some of them. Of several that have one `number` the last counts: more was known of it by then.
    """

    taken: int
    healthy: int
    states: tuple[SavedState, ...]

    def encode(self) -> bytes:
        """The payload of this entry, about 100 bytes a state."""
        head = {
            "taken": self.taken,
            "healthy": self.healthy,
            "states": list(map(state_document, self.states)),
        }
        return encode_payload("saved", head, {})


def state_document(state: SavedState) -> dict[str, Any]:
    """A saved state as JSON has it."""
    return asdict(state) | {"wall_time": json_number(state.wall_time)}


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
        """Sum of two losses."""
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


Entry = (
    RunEntry | SitesEntry | StepsEntry | NormsEntry | EventsEntry | SavedStatesEntry | LostEntry | EndEntry
)

_ARRAYS: dict[str, Callable[[Payload], Entry]] = {
    "sites": _decode_sites,
    "steps": decode_steps,
    "norms": decode_norms,
}
_DOCUMENTS = {
    "run": RunEntry,
    "events": EventsEntry,
    "saved": SavedStatesEntry,
    "lost": LostEntry,
    "end": EndEntry,
}


def decode_entries(data: bytes) -> Sequence[Entry]:
    """The entry in a frame's payload, or several of norms; none for a kind this version does not know.

    `ValueError` where the content makes no sense, whoever wrote it.
    """
    payload = decode_payload(data)
    try:
        if payload.kind == NORMS_BLOCK:
            return decode_block(payload).entries()
        if payload.kind in _ARRAYS:
            return (_ARRAYS[payload.kind](payload),)
        if payload.kind in _DOCUMENTS:
            # Checks every type; keys of a newer gradwatch are ignored.
            return (_adapter(payload.kind).validate_python(dict(payload.fields)),)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a {payload.kind} entry: {error!r}") from error
    return ()
