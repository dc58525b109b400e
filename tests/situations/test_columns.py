"""Columns of whole tensors in unusual models: values equal float64 by hand, and parameters are judged when due."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.engine.columns_needed import OF_UPDATES
from gradwatch.engine.judged_steps import staggered_reads
from gradwatch.records.record import Record
from gradwatch.records.snapshot import Column, Sites
from tests.situations.catalogue import SITUATIONS
from tests.situations.laws import seeded, watched
from tests.situations.probe import Probe, wide
from tests.situations.training import STEPS, Training, small

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what the situations do on purpose

GRADIENTS = {"zero_fraction": lambda g: (g == 0).mean(), "max_abs": lambda g: np.abs(g).max()} | {
    name: getattr(np, name) for name in ("min", "max", "mean", "std")
}
WEIGHTS = ("weight_norm", "weight_mean", "weight_std", "update_norm", "update_ratio")
CADENCES = (1, 2, 3, 10)
RULES = "version: 1\nrules:\n" + "".join(
    f"  {column}-{every}: {{detect: {{kind: above, of: {column}, threshold: -1e30}}, for: 1, every: {every}}}\n"
    for column in (*GRADIENTS, *WEIGHTS)
    for every in CADENCES
)
NAMES = [
    *(name for name in SITUATIONS if name.startswith("zoo: ")),
    *("in-place activations and outputs", "one layer three times in a forward", "tied and reused parameters"),
    *("unused parameter", "ParameterList, ParameterDict", "sparse embedding, SparseAdam", "sparse embedding"),
    *("bf16 parameters", "float64 parameters", "complex parameters", "packed sequences"),
    *("parameters of every dtype, one empty, one scalar", "gradients of stride zero, of views"),
    *("LSTM, MultiheadAttention", "parametrizations", "frozen, unfrozen, frozen, unfrozen"),
]


class Numbers(Probe):
    """Also keeps the numbers of gradients and weights that each step is given, by the name of the parameter."""

    def __init__(self, training: Training) -> None:
        super().__init__(lambda: training.models)
        self.steps: list[dict[str, tuple[np.ndarray | None, np.ndarray]]] = []

    def note(self, optimizer: Optimizer) -> None:
        super().note(optimizer)
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self.steps.append(
            {
                name: (None if param.grad is None else numbers(param.grad), numbers(param))
                for name, param in self.named().items()
                if id(param) in own
            }
        )


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """All real numbers that are stored of a tensor, in float64."""
    if tensor.is_sparse:
        return tensor.detach().coalesce().values().double().numpy().ravel()
    found = wide(tensor)
    return (torch.view_as_real(found) if found.is_complex() else found).numpy().flatten()  # a copy


def by_hand(column: str, now: tuple[Any, np.ndarray], before: tuple[Any, np.ndarray] | None) -> float | None:
    """The column of one parameter at one step; None where it has none."""
    grad, weight = now
    if column in GRADIENTS:
        return None if grad is None or not grad.size else float(GRADIENTS[column](grad))
    if column == "weight_norm":
        return float(np.linalg.norm(weight))
    if column in ("weight_mean", "weight_std"):
        return float((np.mean if column == "weight_mean" else np.std)(weight)) if weight.size else None
    if before is None or before[0] is None or not before[0].any() or before[1].shape != weight.shape:
        return None
    change = float(np.linalg.norm(weight - before[1]))
    return change if column == "update_norm" else change / max(float(np.linalg.norm(before[1])), 0.1)


def judged(record: Record, column: str, every: int) -> set[str]:
    """The parameters that a rule on a column was judged on."""
    mask = record.verdict.breaching.get(f"{column}-{every}", np.zeros(len(record.snapshot.sites), bool))
    return {record.snapshot.sites.names[k] for k in np.flatnonzero(mask)}


def turn(
    phased: staggered_reads.Staggering, sites: Sites, column: str, every: int, record: Record
) -> set[str]:
    """The parameters whose turn it is: all of them at each step, or those of its phase."""
    if column in OF_UPDATES and record.snapshot.step == 0:
        return set()
    return {sites.names[k] for k in np.flatnonzero(phased.due(every, record.snapshot.step))}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_exact_and_judged_when_due(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven columns at four cadences beside each other, of parameters that have phases of their own."""
    monkeypatch.setattr(staggered_reads, "SMALLEST_PART", 1)
    with small():
        training = seeded(SITUATIONS[name].make)
    training.loop = probe = Numbers(training)
    with watched(training, RULES, training.optimizers) as sink:
        for number in range(STEPS):
            training.step(number)
    assert len(sink.records) == len(probe.steps) == STEPS
    before: dict[str, tuple[Any, np.ndarray]] = {}
    overdue: dict[tuple[str, int], set[str]] = {}
    for record, now in zip(sink.records, probe.steps, strict=True):
        sites = record.snapshot.sites
        phased = staggered_reads.Staggering(np.maximum(sites.numels, 1))
        in_turn = {
            (column, every): overdue.get((column, every), set()) | turn(phased, sites, column, every, record)
            for column in (*GRADIENTS, *WEIGHTS)
            for every in CADENCES
        }
        if record.snapshot.provisional:  # parameters were unfrozen in it, so it is not judged
            before, overdue = now, in_turn
            continue
        for column in (*GRADIENTS, *WEIGHTS):
            found = record.snapshot.columns.get(
                column, Column(np.zeros(len(sites)), np.zeros(len(sites), bool))
            )
            wanted = {
                site: by_hand(column, now[site], before.get(site)) for site in sites.names if site in now
            }
            there = {site: value for site, value in wanted.items() if value is not None}
            present = {sites.names[k]: float(found.values[k]) for k in np.flatnonzero(found.present)}
            assert present.keys() == there.keys(), (column, record.snapshot.step)
            largest = (
                {site: by_hand("max_abs", now[site], None) or 0.0 for site in there}
                if column in ("mean", "std")
                else {}
            )
            for site, value in there.items():
                least = 1e-6 * max(
                    largest.get(site, 0.0), "weight_" in column
                )  # a mean of both signs is as good as what it is of
                assert present[site] == pytest.approx(value, rel=1e-5, abs=least), (column, site)
            for every in CADENCES:
                due = in_turn[column, every]
                got = judged(record, column, every)
                assert got == due & there.keys(), (column, every, record.snapshot.step)
                overdue[column, every] = due - got
        before = now


def test_a_user_s_clip_is_in_what_is_read() -> None:
    """Values of gradients are those that the optimizer gets: after the script's own clip, unlike `norm`."""
    model = nn.Linear(4, 1, bias=False)
    training = Training([model], [torch.optim.SGD(model.parameters(), 0.1)])
    rules = "version: 1\nrules: {m: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 1}}"
    with watched(training, rules, training.optimizers) as sink:
        model(torch.full((1, 4), 100.0)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.optimizers[0].step()
    (record,) = sink.records
    assert record.snapshot.norm[0] == pytest.approx(200.0)
    assert record.snapshot.columns["max_abs"].values[0] == pytest.approx(0.5, rel=1e-5)
