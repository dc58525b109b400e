"""Synthetic Records for the tests of sinks: what a watched run would hand over, without a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.records.decision import Decision, Order
from gradwatch.records.event import Event
from gradwatch.records.record import Record
from gradwatch.records.run_info import RuleInfo, RunInfo
from gradwatch.records.snapshot import Column, Sites, Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.prometheus.sink import PrometheusSink

RULES = (
    RuleInfo("non-finite", "nonfinite", "critical", ("skip_step",)),
    RuleInfo("exploding", "spike", "warning"),
)


def make_sites(
    count: int = 4, *, names: Sequence[str] | None = None, groups: Sequence[str] | None = None, ndim: int = 2
) -> Sites:
    """`count` parameters in two groups; or the names and groups given."""
    names = tuple(names) if names is not None else tuple(f"layers.{i}.weight" for i in range(count))
    size = len(names)
    if groups is None:
        groups = ["embed" if i < size // 2 else "rest" for i in range(size)]
    numels, ndims = np.full(size, 100, np.int64), np.full(size, ndim, np.int64)
    return Sites(names, ("param",) * size, numels, ndims, np.arange(size), tuple(groups))


def make_record(
    sites: Sites,
    norm: Any = 1.0,
    *,
    step: int = 0,
    optimizer: int = 0,
    calls: Any = 1,
    applied: float = 1.0,
    overhead: float = 1e-4,
    step_seconds: float | None = 0.01,
    events: tuple[Event, ...] = (),
    firing: Sequence[str] = (),
    decision: Decision | None = None,
    columns: Mapping[str, Column] | None = None,
    wall_time: float = 1_700_000_000.0,
    **snapshot: Any,
) -> Record:
    """One step; `norm` and `calls` are broadcast over the sites, and the totals follow from them."""
    size = len(sites)
    norm_S = np.broadcast_to(np.asarray(norm, np.float32), size).copy()
    calls_S = np.broadcast_to(np.asarray(calls, np.int32), size).copy()
    total = float(np.sqrt(np.square(norm_S[calls_S > 0], dtype=np.float64).sum()))
    measured = Snapshot(
        optimizer,
        step,
        sites,
        norm_S,
        calls_S,
        np.full(size, applied, np.float32),
        total,
        total * applied,
        columns=columns or {},
        **snapshot,
    )
    verdict = Verdict(firing={rule: np.zeros(size, bool) for rule in firing}, events=events)
    return Record(measured, verdict, decision or Decision(), overhead, step_seconds, wall_time)


def make_event(kind: Any = "firing", rule: str = "non-finite", step: int = 0, **fields: Any) -> Event:
    """A transition of one of `RULES`."""
    known = {info.id: info for info in RULES}
    detector, severity = (known[rule].kind, known[rule].severity) if rule in known else ("above", "info")
    severity = fields.pop("severity", severity)
    optimizer, incident = fields.pop("optimizer", 0), fields.pop("incident", "incident-1")
    return Event(kind, rule, detector, severity, optimizer, step, incident, **fields)


def skip(rule: str = "non-finite", *, shadow: bool = False) -> Decision:
    """What a rule with `do: [skip_step]` decides."""
    return Decision(skip=not shadow, orders=frozenset({Order(rule, "skip_step", shadow)}))


def make_run(directory: Path, **fields: Any) -> RunInfo:
    """A run whose folder lies under `directory`."""
    versions = {"gradwatch": "0.1.0", "python": "3.11", "torch": "2.13.0"}
    defaults: dict[str, Any] = {"pid": os.getpid(), "versions": versions, "rules": RULES, "host": "node-1"}
    return RunInfo("run-1", str(directory / "run-1"), **{**defaults, **fields})


@contextmanager
def serving(directory: Path, health: Health | None = None, **options: Any) -> Iterator[PrometheusSink]:
    """An open PrometheusSink on a free port."""
    sink = PrometheusSink(options.pop("listen", "127.0.0.1:0"), **options)
    sink.open(make_run(directory), health or Health())
    try:
        yield sink
    finally:
        sink.close()


def descriptors() -> dict[str, str]:
    """What every file descriptor of this process points to."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
    return found


def sockets() -> int:
    """How many sockets and selectors this process holds."""
    return sum(target.startswith(("socket:", "anon_inode:[eventpoll]")) for target in descriptors().values())
