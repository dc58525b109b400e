"""Columns of running means and variances: equal to float64 by hand, in turns, and what rules find in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.capture.columns import running_statistics
from gradwatch.capture.columns.pending_columns import PendingColumns
from gradwatch.capture.columns.running_statistics import RUNNING_COLUMNS, RunningStatisticsReader
from gradwatch.engine.columns_needed import EVERY_STEP, Needs
from gradwatch.engine.judged_steps.staggered_reads import Staggering
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.kept import Kept

CADENCES = (1, 2, 3, 10)
RULES = "version: 1\nmodules: {tap: output}\nrules:\n" + "".join(
    f"  {column}-{every}: {{detect: {{kind: above, of: {column}, threshold: -1e30}}, for: 1, every: {every}}}\n"
    for column in sorted(RUNNING_COLUMNS)
    for every in CADENCES
)
WITHOUT_OPTIMIZER: dict[str, tuple[str, Callable[[np.ndarray], float]]] = {
    "running_mean_norm": ("running_mean", lambda values: float(np.linalg.norm(values))),
    "running_var_min": ("running_var", lambda values: float(values.min())),
    "running_var_max": ("running_var", lambda values: float(values.max())),
}


class Layers(nn.Module):
    """Normalisations of every kind: with and without statistics, lazy, frozen in evaluation, of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain = nn.LazyBatchNorm1d(), nn.BatchNorm1d(6, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(6, track_running_stats=True)
        self.frozen, self.layer = nn.BatchNorm1d(6).eval(), nn.LayerNorm(6)
        self.cumulative = nn.SyncBatchNorm(6, momentum=None)
        self.narrow = nn.BatchNorm1d(6).to(torch.bfloat16)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.frozen(self.plain(self.first(self.linear(x)))))
        x = self.narrow((x + self.instance(x.t()[None, :, :6])[0].mean()).to(torch.bfloat16)).float()
        return nn.functional.batch_norm(
            x, self.cumulative.running_mean, self.cumulative.running_var, training=True
        )


def watched(
    model: nn.Module, batches: list[Tensor], rules: str, tmp_path: Path
) -> tuple[list[Record], list[dict[str, np.ndarray]], dict[str, str]]:
    """The Records; the buffers at each step boundary, in float64; the rules without data."""
    with torch.no_grad():
        model(batches[0])  # of lazy layers
    optimizer, kept, buffers = torch.optim.SGD(model.parameters(), 0.01), Kept(), []
    with gradwatch.watch(model, optimizer, rules=parse_rules(rules), run_dir=tmp_path, sinks=[kept]) as gw:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            buffers.append({name: buffer.double().numpy() for name, buffer in model.named_buffers()})
            buffers[-1] = {name: value.copy() for name, value in buffers[-1].items()}
            optimizer.step()
        reasons = dict(session_of(gw).account().no_data)
    return kept.records, buffers, reasons


def test_values_are_exact_and_judged_in_turns(tmp_path: Path) -> None:
    """Three columns at four cadences beside each other, of layers of every kind."""
    torch.manual_seed(0)
    batches = [torch.randn(8, 6) * (1 + number) + number for number in range(23)]
    records, buffers, _ = watched(Layers(), batches, RULES, tmp_path)
    counts: dict[str, int] = {}
    for record, now in zip(records, buffers, strict=True):
        sites, step = record.snapshot.sites, record.snapshot.step
        modules = [name for name, kind in zip(sites.names, sites.kinds, strict=True) if kind == "module"]
        for column, (buffer, of) in WITHOUT_OPTIMIZER.items():
            wanted = {name: of(now[f"{name}.{buffer}"]) for name in modules if f"{name}.{buffer}" in now}
            assert set(wanted) == {"first", "instance", "frozen", "cumulative", "narrow"}
            found = record.snapshot.columns[column]
            present = {sites.names[k]: float(found.values[k]) for k in np.flatnonzero(found.present)}
            assert present == pytest.approx(wanted, rel=1e-6), (column, step)
            for every in CADENCES:
                rule = f"{column}-{every}"
                mask = record.verdict.breaching.get(rule, np.zeros(len(sites), bool))
                for k in np.flatnonzero(mask):
                    counts[f"{rule} {sites.names[k]}"] = counts.get(f"{rule} {sites.names[k]}", 0) + 1
    assert len(counts) == len(RUNNING_COLUMNS) * len(CADENCES) * 5
    assert all(23 // int(key.split()[0].split("-")[1]) <= count for key, count in counts.items())


def test_a_nan_that_stays_hides_none_elsewhere(tmp_path: Path) -> None:
    """Running statistics that are NaN from step 3 on are one fact, with the layer; the NaN loss of step 7 another."""
    rules = """version: 1
modules: {tap: output}
rules:
  statistics: {detect: {kind: nonfinite, of: running_mean_norm}, every: 1}
  loss: {detect: {kind: loss_nonfinite}}
"""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Linear(6, 2))
    batches = [torch.randn(8, 6) for _ in range(9)]
    batches[7] = torch.full((8, 6), math.nan)

    def ruin(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        if args[0] is batches[3]:
            assert norm.running_mean is not None
            norm.running_mean.fill_(math.nan)

    model.register_forward_pre_hook(ruin)
    records, _, _ = watched(model, batches, rules, tmp_path)
    fired = [
        (event.rule, record.snapshot.step, event.sites)
        for record in records
        for event in record.verdict.events
        if event.kind == "firing"
    ]
    assert fired == [("statistics", 3, ("0",)), ("loss", 7, ())]


def test_drift_of_a_variance_is_found(tmp_path: Path) -> None:
    """Inputs that grow by a tenth each step: the running variance leaves its long-term level, the layer is named."""
    rules = """version: 1
modules: {tap: output}
rules:
  drifts:
    detect: {kind: drift, of: running_var_max, above: 10, fast: 5, window: 40, lag: 20}
    scope: module
    every: 1
    warmup: 60
"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=0.5), nn.Linear(6, 2))
    batches = [torch.randn(32, 6) * 1.1 ** max(0, number - 60) for number in range(120)]
    records, _, _ = watched(model, batches, rules, tmp_path)
    steps = [
        (event.sites, record.snapshot.step)
        for record in records
        for event in record.verdict.events
        if event.kind == "firing"
    ]
    assert [sites for sites, _ in steps] == [("0",)]
    assert 60 < steps[0][1] < 120


def test_a_model_without_such_layers_says_so(tmp_path: Path) -> None:
    """The rules are without data, for the reason that no tapped module keeps statistics."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    _, _, reasons = watched(model, [torch.randn(8, 6)] * 12, RULES, tmp_path)
    assert len(reasons) == len(RUNNING_COLUMNS) * len(CADENCES)
    assert set(reasons.values()) == {
        "none of the tapped modules keeps a running mean and variance (BatchNorm, InstanceNorm)"
    }


@pytest.mark.parametrize("layer", [nn.LazyBatchNorm1d, nn.LazyInstanceNorm1d])
def test_a_lazy_layer_that_gets_its_shape_after_the_attach_is_read(layer: type[nn.Module]) -> None:
    """Its class changes in its first forward."""
    norm = layer(track_running_stats=True)
    needs = Needs(dict.fromkeys(RUNNING_COLUMNS, EVERY_STEP), {})
    reader = RunningStatisticsReader([norm], needs, Staggering(np.zeros(1, np.int64)))
    norm(torch.randn(3, 4, 5))
    pending = PendingColumns(1)
    reader.read(pending, 0)
    assert pending.columns()["running_var_max"].values[0] == pytest.approx(float(norm.running_var.max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_device_nothing_waits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers by operations that leave them on the device."""
    layer = nn.BatchNorm1d(50).to(dtype)
    with torch.no_grad():
        layer.running_mean.normal_()  # type: ignore[union-attr]
        layer.running_var.uniform_(0.1, 9.0)  # type: ignore[union-attr]
    needs = Needs(dict.fromkeys(RUNNING_COLUMNS, EVERY_STEP), {})
    reader = RunningStatisticsReader([nn.Linear(2, 2), layer], needs, Staggering(np.zeros(2, np.int64)))
    host, device = PendingColumns(2), PendingColumns(2)
    reader.read(host, 0)
    monkeypatch.setattr(running_statistics, "on_host", lambda tensor: False)
    with Operations() as operations:
        reader.read(device, 0)
    assert not [name for name in operations.names if name in WAITING]
    for name, column in host.columns().items():
        assert device.columns()[name].values == pytest.approx(column.values, rel=1e-6), name
        assert column.present.tolist() == [False, True]
