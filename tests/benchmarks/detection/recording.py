"""A training under watch, kept as what the engine reads of every step: a Snapshot each, in a file of arrays.

Axes: T steps of one optimizer with the same sites, S sites.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import gradwatch
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.records.snapshot import Column, Sites, Snapshot
from gradwatch.rules.files import load_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.internal_errors import Health
from tests.benchmarks.detection.split import TRAININGS
from tests.benchmarks.detection.training import Fault, Loop

RULES = Path(__file__).with_name("recording.rules.yaml")
_PER_SITE = ("norm", "calls", "coef")
_PER_STEP = ("step", "total_norm", "total_norm_applied", "micro", "provisional", "coverage")
_LOSS_SCALE = "loss_scale"
Arrays = Mapping[str, NDArray[Any]]


class Key(NamedTuple):
    """What was recorded: a training, its seed, and the fault in it ("" = none)."""

    training: str
    seed: int
    fault: str = ""

    def path(self, folder: Path) -> Path:
        """The file in a folder of recordings."""
        return folder / f"{self.training}.{self.seed}{self.fault and '.' + self.fault}.npz"


@dataclass(frozen=True, slots=True)
class Recording:
    """The Snapshots of a training, of all its optimizers in the order in which these stepped.

    `onset` is the step of the loop at which the fault began, `horizon` the steps in which it has to be found, `first`
    the number of Snapshots before it, `culprits` the parameters that are at fault (none: the whole model, or none).
    `error` is what ended the training early.
    """

    key: Key
    snapshots: Sequence[Snapshot]
    onset: int = 0
    horizon: int = 0
    first: int = 0
    culprits: frozenset[str] = frozenset()
    error: str = ""


class Memory:
    """A sink that keeps every Snapshot."""

    name = "memory"

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.health: Health | None = None

    def open(self, run: RunInfo, health: Health) -> None:
        """Nothing to get ready."""
        self.health = health

    def write(self, record: Record) -> None:
        """Keep the Snapshot of one step."""
        self.snapshots.append(record.snapshot)

    def flush(self, timeout: float) -> bool:
        """Nothing waits."""
        return True

    def close(self) -> None:
        """Nothing to give back."""


def record(
    key: Key,
    steps: int,
    fault: Fault | None = None,
    culprits: Callable[[], frozenset[str]] = frozenset,
    rules: RuleSet | None = None,
    memory: Memory | None = None,
) -> Recording:
    """Train under watch, and keep what was measured. One thread, and the same numbers every time.

    `culprits` is asked when the fault is in place.
    """
    with one_thread():
        return _record(key, steps, fault, culprits, rules, memory)


@cache
def recording_rules() -> RuleSet:
    """The rules by which nothing is judged and everything measured."""
    return load_rules(os.fspath(RULES))


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of one thread have one order, and small tensors need no second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _record(
    key: Key,
    steps: int,
    fault: Fault | None,
    culprits: Callable[[], frozenset[str]],
    rules: RuleSet | None,
    memory: Memory | None,
) -> Recording:
    torch.manual_seed(key.seed)
    fault, memory = fault or Fault(), memory or Memory()
    training = TRAININGS[key.training](key.seed)
    chosen = recording_rules() if rules is None else rules
    first, error = 0, ""
    try:
        loop = Loop(training, fault)
        watch = gradwatch.watch(
            training.model, training.optimizers, rules=chosen, sinks=[memory], strict=True
        )
        with watch:
            for step in range(steps):
                if step == fault.onset:
                    watch.flush()
                    first = len(memory.snapshots)
                loop.step(step)
    except (
        ValueError,
        RuntimeError,
    ) as raised:  # a fault may end a training: a distribution of NaN, no gradient
        if not key.fault:
            raise
        error = f"{type(raised).__name__}: {raised}"
    finally:
        if training.close is not None:
            training.close()
    return Recording(key, memory.snapshots, fault.onset, fault.horizon, first, culprits(), error)


# -- files ----------------------------------------------------------------------------------------------------


def save(recording: Recording, folder: Path) -> None:
    """Write a recording; a file is whole or not there."""
    segments: list[tuple[int, Sites, list[Snapshot]]] = []
    order = []
    for snapshot in recording.snapshots:
        number = next(
            (
                n
                for n, one in enumerate(segments)
                if one[0] == snapshot.optimizer and one[1] is snapshot.sites
            ),
            None,
        )
        if number is None:
            number = len(segments)
            segments.append((snapshot.optimizer, snapshot.sites, []))
        segments[number][2].append(snapshot)
        order.append(number)
    arrays: dict[str, NDArray[Any]] = {"order": np.array(order, np.int16)}
    for number, (_, _, part) in enumerate(segments):
        arrays |= {f"{number}/{name}": values for name, values in _arrays(part)}
    meta = {
        "key": recording.key,
        "onset": recording.onset,
        "horizon": recording.horizon,
        "first": recording.first,
        "culprits": sorted(recording.culprits),
        "error": recording.error,
        "segments": [{"optimizer": index, "sites": _described(sites)} for index, sites, _ in segments],
    }
    path = recording.key.path(folder)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as file:
        np.savez_compressed(file, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
    partial.replace(path)


def _described(sites: Sites) -> dict[str, list[Any]]:
    return {
        "names": list(sites.names),
        "kinds": list(sites.kinds),
        "numels": sites.numels.tolist(),
        "ndims": sites.ndims.tolist(),
        "depths": sites.depths.tolist(),
    }


def _arrays(part: Sequence[Snapshot]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of one optimizer: [T, S] of a column, [T] of a scalar, and where they are present."""
    for name in (*_PER_SITE, *_PER_STEP):
        yield name, np.array([getattr(one, name) for one in part])
    for name in sorted({name for one in part for name in one.columns}):
        columns = [one.columns.get(name) for one in part]
        empty = np.zeros(len(part[0].sites), np.float32)
        values = np.array([empty if one is None else one.values for one in columns], np.float32)
        present = np.array([np.zeros(len(empty), bool) if one is None else one.present for one in columns])
        if present.any():
            yield f"column/{name}", values
            yield f"present/{name}", np.packbits(present, axis=1)
    scalars = [
        {**one.scalars, **({} if one.loss_scale is None else {_LOSS_SCALE: one.loss_scale})} for one in part
    ]
    for name in sorted({name for one in scalars for name in one}):
        yield f"scalar/{name}", np.array([one.get(name, 0.0) for one in scalars], np.float64)
        yield f"observed/{name}", np.array([name in one for one in scalars])


def load(path: Path) -> Recording:
    """Read what `save` wrote."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays.pop("meta")))
    parts = [
        _snapshots(_of(arrays, f"{number}/"), one["optimizer"], _sites(one["sites"]))
        for number, one in enumerate(meta["segments"])
    ]
    return Recording(
        Key(*meta["key"]),
        [next(parts[number]) for number in arrays["order"]],
        meta["onset"],
        meta.get("horizon", 0),
        meta["first"],
        frozenset(meta["culprits"]),
        meta["error"],
    )


def _of(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)}


def _sites(told: Mapping[str, list[Any]]) -> Sites:
    numbers = (np.array(told[name], np.int64) for name in ("numels", "ndims", "depths"))
    return Sites(tuple(told["names"]), tuple(told["kinds"]), *numbers)


def _snapshots(arrays: Arrays, optimizer: int, sites: Sites) -> Iterator[Snapshot]:
    """The Snapshots of one optimizer, one after the other."""
    columns, scalars, observed = (_of(arrays, f"{kind}/") for kind in ("column", "scalar", "observed"))
    present = {
        name: np.unpackbits(bits, axis=1, count=len(sites)).astype(bool)
        for name, bits in _of(arrays, "present/").items()
    }
    for t in range(len(arrays["step"])):
        values = {name: float(one[t]) for name, one in scalars.items() if observed[name][t]}
        yield Snapshot(
            optimizer,
            int(arrays["step"][t]),
            sites,
            arrays["norm"][t],
            arrays["calls"][t],
            arrays["coef"][t],
            float(arrays["total_norm"][t]),
            float(arrays["total_norm_applied"][t]),
            values.pop(_LOSS_SCALE, None),
            {
                name: Column(one[t], present[name][t])
                for name, one in columns.items()
                if present[name][t].any()
            },
            values,
            int(arrays["micro"][t]),
            bool(arrays["provisional"][t]),
            float(arrays["coverage"][t]),
        )
