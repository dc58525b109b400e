"""Run one row of the matrix under a real watch, and compare every number with the probe's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

import gradwatch
from gradwatch.records.snapshot import Record, Snapshot
from gradwatch.rules.files import parse_rules
from tests.matrix.probe import Expected, Probe
from tests.support.kept import Kept

STEPS = 14
TOLERANCE = 1e-5  # relative, against float64
NUMBERS = ("norm", "norm_applied", "norm_local", "total_norm")
RULES = "version: 1\nrules: {local: {detect: {kind: above, of: norm_local, threshold: 1e9}}}"


class Loop:
    """What a row works with: it calls `watch` once its models are there, then trains through `probe`."""

    def __init__(self) -> None:
        self.sink = Kept()
        self.models: list[nn.Module] = []
        self.probe = Probe(lambda: self.models)
        self.gw: gradwatch.Watch | None = None

    def watch(self, *models: nn.Module, optimizers: list[Optimizer] | None = None) -> Probe:
        self.models = list(models)
        self.gw = gradwatch.watch(
            self.models, optimizers, rules=parse_rules(RULES), sinks=[self.sink], strict=True
        )
        return self.probe


@dataclass(frozen=True)
class Row:
    """A situation: `run` trains in it; `special` are numbers that are not simply right, and what they are."""

    name: str
    run: Callable[[Loop], None]
    special: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Result:
    """Worst relative error of each number over all steps that are not provisional; inf = missing or invented."""

    worst: dict[str, float]
    steps: int
    provisional: int

    def said(self, number: str) -> str:
        """The cell of the table."""
        if self.provisional == self.steps and number != "norm_applied":
            return "provisional"
        error = self.worst[number]
        return "right" if error <= TOLERANCE else "absent" if math.isinf(error) else f"off by {error:.0e}"


def measure(row: Row) -> Result:
    """Train, then compare step by step; an exception in the row is the caller's."""
    torch.manual_seed(1)
    torch._dynamo.reset()
    loop = Loop()
    try:
        row.run(loop)
        assert loop.gw is not None
        assert loop.gw.health.errors() == {}
        assert loop.sink.records[-1].snapshot.coverage == 1.0
    finally:
        if loop.gw is not None:
            loop.gw.close()
    # A step that a GradScaler rejects is a Record that says so; the optimizer, and so the probe, never saw it.
    records = [one for one in loop.sink.records if not one.snapshot.scalars.get("scaler_skip")]
    expected = loop.probe.expected
    assert len(records) == len(expected) > 0, f"{len(records)} Snapshots for {len(expected)} steps"
    worst = dict.fromkeys(NUMBERS, 0.0)
    for record, want in zip(records, expected, strict=True):
        numbers = ("norm_applied",) if record.snapshot.provisional else NUMBERS
        for number in numbers:
            worst[number] = max(worst[number], error_of(number, record, want))
    provisional = sum(record.snapshot.provisional for record in records)
    return Result(worst, len(records), provisional)


measured = cache(measure)


def error_of(number: str, record: Record, want: Expected) -> float:
    """The largest relative error of one number at one step; inf where sites are missing or invented."""
    if number == "total_norm":
        return _relative(record.snapshot.total_norm, want.total_norm)
    got, wanted = _by_name(record.snapshot, number), getattr(want, number)
    if got.keys() != wanted.keys():
        return math.inf
    return max((_relative(got[name], wanted[name]) for name in wanted), default=0.0)


def _by_name(snapshot: Snapshot, number: str) -> dict[str, float]:
    column = snapshot.column(number)
    if column is None:
        return {}
    triples = zip(snapshot.sites.names, column.values.tolist(), column.present.tolist(), strict=True)
    return {name: value for name, value, present in triples if present}


def _relative(got: float, want: float) -> float:
    error = abs(got - want) / want if want else abs(got)
    return math.inf if math.isnan(error) else error
