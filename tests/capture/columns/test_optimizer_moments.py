"""Columns of an optimizer's moments: equal to float64 by hand, at their cadence, and no part of what is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradwatch
from gradwatch.capture.columns import moment_cosine, optimizer_moments, update_ratio
from gradwatch.capture.columns.optimizer_moments import COSINE, NEAR_ZERO, STATE_COLUMNS, read_optimizer_state
from gradwatch.capture.columns.pending_columns import PendingColumns
from gradwatch.engine.judged_steps import staggered_reads
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.kept import Kept

STEPS, CADENCES = 13, (1, 2, 3, 10)
COLUMNS = ("moment_norm", "second_moment_rms", "second_moment_near_zero")
RULES = "version: 1\nrules:\n" + "".join(
    f"  {column}-{every}: {{detect: {{kind: above, of: {column}, threshold: -1e30}}, for: 1, every: {every}}}\n"
    for column in COLUMNS
    for every in CADENCES
)
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, tuple[Make, str, str]] = {
    "Adam": (lambda params: torch.optim.Adam(params, 0.01), "exp_avg", "exp_avg_sq"),
    "Adam, amsgrad": (lambda params: torch.optim.Adam(params, 0.01, amsgrad=True), "exp_avg", "exp_avg_sq"),
    "AdamW, fused": (lambda params: torch.optim.AdamW(params, 0.01, fused=True), "exp_avg", "exp_avg_sq"),
    "NAdam": (lambda params: torch.optim.NAdam(params, 0.01), "exp_avg", "exp_avg_sq"),
    "RAdam": (lambda params: torch.optim.RAdam(params, 0.01), "exp_avg", "exp_avg_sq"),
    "Adamax": (lambda params: torch.optim.Adamax(params, 0.01), "exp_avg", ""),
    "SGD, momentum": (lambda params: torch.optim.SGD(params, 0.01, momentum=0.9), "momentum_buffer", ""),
    "SGD": (lambda params: torch.optim.SGD(params, 0.01), "", ""),
    "RMSprop": (lambda params: torch.optim.RMSprop(params, 0.01), "", "square_avg"),
    "RMSprop, momentum": (
        lambda params: torch.optim.RMSprop(params, 0.01, momentum=0.9),
        "momentum_buffer",
        "square_avg",
    ),
    "Adadelta": (lambda params: torch.optim.Adadelta(params, 0.01), "", "square_avg"),
    "Adagrad": (lambda params: torch.optim.Adagrad(params, 0.01), "", ""),
    "Adafactor": (lambda params: torch.optim.Adafactor(params, 0.01), "", ""),
    "Rprop": (lambda params: torch.optim.Rprop(params, 0.01), "", ""),
    "ASGD": (lambda params: torch.optim.ASGD(params, 0.01), "", ""),
}


class Odd(nn.Module):
    """Weights of many kinds: large, in columns, complex, a scalar, empty, tied, unused, with tiny gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.large = nn.Linear(300, 300, dtype=dtype)
        self.first, self.tied = (nn.Linear(6, 6, bias=False, dtype=dtype) for _ in range(2))
        self.tied.weight = self.first.weight
        self.columns = nn.Parameter(torch.randn(5, 7, dtype=dtype).t())
        self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.faint = nn.Parameter(torch.randn(40, dtype=dtype))

    def forward(self, number: int) -> Tensor:
        x = torch.linspace(-1, 1, 300, dtype=self.large.weight.dtype) * (number + 1)
        found = self.large(x).square().sum() * self.scale + self.tied(self.first(x[:6])).sum()
        faint = (self.faint * torch.logspace(-12, 2, 40).to(x)).sum() + self.empty.sum()
        real = 1e-4 * found + self.columns.sum() * number + faint
        return real.float() + self.spectrum.abs().square().sum()


def by_hand(column: str, moment: Any) -> float | None:
    """A column of one moment in float64; None where there is none."""
    if not isinstance(moment, Tensor) or not moment.numel():
        return None
    real = torch.view_as_real(moment) if moment.is_complex() else moment
    values = real.detach().double().numpy()
    if column == "moment_norm":
        return float(np.linalg.norm(values.ravel()))
    return float(
        np.sqrt((values**2).mean()) if column == "second_moment_rms" else (values < NEAR_ZERO).mean()
    )


def trained(
    model: nn.Module, optimizer: Optimizer, rules: str, tmp_path: Path, steps: int = STEPS
) -> tuple[list[Record], list[dict[str, dict[str, Any]]], dict[str, str]]:
    """The Records; a copy of the state of each parameter before each step; the rules without data."""
    kept, states = Kept(), []
    with gradwatch.watch(model, optimizer, rules=parse_rules(rules), run_dir=tmp_path, sinks=[kept]) as gw:
        for number in range(steps):
            optimizer.zero_grad()
            model(number).backward()
            states.append(
                {
                    name: {key: value.clone() for key, value in found.items() if isinstance(value, Tensor)}
                    for name, param in model.named_parameters()
                    if (found := optimizer.state.get(param)) is not None
                }
            )
            optimizer.step()
        reasons = dict(session_of(gw).account().no_data)
    return kept.records, states, reasons


def judged(record: Record, rule: str) -> set[str]:
    """The parameters that a rule was judged on."""
    mask = record.verdict.breaching.get(rule, np.zeros(len(record.snapshot.sites), bool))
    return {record.snapshot.sites.names[k] for k in np.flatnonzero(mask)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIMIZERS),
        *(
            (name, dtype)
            for name in ("Adam", "RMSprop, momentum")
            for dtype in (torch.bfloat16, torch.float64)
        ),
    ],
)
def test_values_are_exact_and_judged_when_due(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three columns at four cadences beside each other, of parameters that have phases of their own."""
    monkeypatch.setattr(staggered_reads, "SMALLEST_PART", 1)
    torch.manual_seed(0)
    make, first, second = OPTIMIZERS[name]
    model = Odd(dtype)
    if name in ("Adafactor", "Rprop", "AdamW, fused"):  # they refuse complex weights, or empty ones
        model.spectrum.requires_grad_(False)
        model.empty.requires_grad_(False)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    records, states, _ = trained(model, optimizer, RULES, tmp_path)
    seen: set[str] = set()
    for record, state in zip(records, states, strict=True):
        sites, step = record.snapshot.sites, record.snapshot.step
        for column in COLUMNS:
            key = first if column == "moment_norm" else second
            moments = {site: state.get(site, {}).get(key) for site in sites.names}
            wanted = {
                site: value
                for site, moment in moments.items()
                if (value := by_hand(column, moment)) is not None
            }
            found = record.snapshot.columns.get(column)
            present = (
                {}
                if found is None
                else {sites.names[k]: float(found.values[k]) for k in np.flatnonzero(found.present)}
            )
            assert present == pytest.approx(wanted, rel=1e-5, abs=0), (column, step)
            seen |= {column for _ in wanted}
            for every in CADENCES:
                phases = staggered_reads.Staggering(np.maximum(sites.numels, 1)).phases(every)
                due = {sites.names[k] for k in np.flatnonzero(phases == step % every)}
                wanted_here = wanted.keys() & (due if every > 1 else set(sites.names))
                assert judged(record, f"{column}-{every}") == wanted_here, (column, every, step)
    assert seen == {column for column, key in zip(COLUMNS, (first, second, second), strict=True) if key}


@pytest.mark.parametrize("name", ["SGD", "SGD, momentum", "Adagrad", "Adamax"])
def test_an_optimizer_without_such_a_moment_says_so(name: str, tmp_path: Path) -> None:
    """The rule is without data, for the reason that nothing of the kind is kept."""
    make, first, second = OPTIMIZERS[name]
    model = Odd(torch.float32)
    _, _, reasons = trained(model, make(model.parameters()), RULES, tmp_path)
    assert {rule.partition("-")[0] for rule in reasons} == {
        column for column, key in zip(COLUMNS, (first, second, second), strict=True) if not key
    }
    assert all("keeps no" in reason and "moment of these parameters" in reason for reason in reasons.values())


def test_nothing_is_written_to_an_optimizer(tmp_path: Path) -> None:
    """Training is bit-identical, and the state has no entry that it would not have had."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Odd(torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        if watched:
            trained(model, optimizer, RULES, tmp_path)
        else:
            for number in range(STEPS):
                optimizer.zero_grad()
                model(number).backward()
                optimizer.step()
        ends.append(optimizer.state_dict() | {"weights": list(model.state_dict().values())})
    bare, seen = ends
    assert bare["state"].keys() == seen["state"].keys()
    for k, kept in bare["state"].items():
        assert all(torch.equal(value, seen["state"][k][key]) for key, value in kept.items())
    assert all(map(torch.equal, bare["weights"], seen["weights"]))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"exp_avg": 3.0},
        {"exp_avg": torch.zeros(2, 3)},
        {"exp_avg": torch.zeros(6, dtype=torch.uint8)},
        {"exp_avg": torch.eye(3).to_sparse()},
        {"exp_avg": torch.zeros(6, device="meta"), "exp_avg_sq": torch.zeros(6, device="meta")},
        None,
    ],
    ids=["empty", "number", "other shape", "8 bits", "sparse", "on no device", "no map"],
)
def test_what_is_no_moment_is_not_read(state: Any) -> None:
    """Of a key by that name with something else, or of an optimizer without a state, there is no column."""
    param = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([param], 0.1)
    optimizer.state = {param: state} if state is not None else None  # type: ignore[assignment]
    pending = PendingColumns(1)
    due, gradients = {name: [0] for name in STATE_COLUMNS}, [torch.ones(6)]
    read_optimizer_state(pending, due, [param], optimizer, gradients)
    assert pending.columns() == {}
    read_optimizer_state(pending, due, [param], None, gradients)
    assert pending.columns() == {}


class Unreadable(torch.optim.SGD):
    """Its state raises when it is looked into."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not yet")

    @state.setter
    def state(self, value: Any) -> None: ...


def test_a_state_that_cannot_be_read_costs_no_other_rule_its_verdict(tmp_path: Path) -> None:
    """Its own columns are an internal error; the step is judged all the same."""
    rules = parse_rules(
        "version: 1\nrules:\n"
        "  moment: {detect: {kind: above, of: moment_norm, threshold: -1}, for: 1, every: 1}\n"
        "  norm: {detect: {kind: above, of: norm, threshold: -1}, for: 1}\n"
    )
    model, kept = nn.Linear(3, 1), Kept()
    optimizer = Unreadable(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[kept]) as gw:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert gw.health.errors() == {"columns": 5}  # at the first step there is no moment yet
    assert [record.verdict.breaching.keys() for record in kept.records] == [{"norm"}] * 6


def test_the_root_mean_square_of_groups_is_that_of_their_elements(tmp_path: Path) -> None:
    """`scope: total` is the root mean square over all elements, the norm that of all, the share by elements."""
    rules = "version: 1\nrules:\n" + "".join(
        f"  {column}: {{detect: {{kind: above, of: {column}, threshold: -1}}, scope: total, every: 1}}\n"
        for column in COLUMNS
    )
    torch.manual_seed(0)
    model = Odd(torch.float32)
    records, states, _ = trained(model, torch.optim.Adam(model.parameters(), 0.01), rules, tmp_path, 2)
    values = {event.rule: event.value for record in records for event in record.verdict.events}
    kept = [state for state in states[1].values() if state["exp_avg"].numel()]
    first = np.concatenate([np.abs(numbers(state["exp_avg"])) for state in kept])
    assert values["moment_norm"] == pytest.approx(np.linalg.norm(first), rel=1e-5)
    weights = [state["exp_avg"].numel() for state in kept]  # a complex element is one
    by_site = {
        column: np.array([by_hand(column, state["exp_avg_sq"]) for state in kept]) for column in COLUMNS[1:]
    }
    mean_square = np.average(by_site["second_moment_rms"] ** 2, weights=weights)
    assert values["second_moment_rms"] == pytest.approx(math.sqrt(mean_square), rel=1e-5)
    share = np.average(by_site["second_moment_near_zero"], weights=weights)
    assert values["second_moment_near_zero"] == pytest.approx(share, rel=1e-5)
    assert 0 < share < 1


def test_on_a_device_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers by operations that leave them on the device, also of types that cannot hold the bound."""
    moments = {
        torch.float32: torch.tensor([0.0, 1e-20, NEAR_ZERO, 3.0]),
        torch.float16: torch.tensor([0.0, 0.0, 1e-7, 3.0], dtype=torch.float16),
        torch.bfloat16: torch.tensor([0.0, 1e-20, NEAR_ZERO, 3.0], dtype=torch.bfloat16),
    }
    params = [nn.Parameter(torch.zeros_like(moment)) for moment in moments.values()]
    optimizer = torch.optim.Adam(params)
    for param, moment in zip(params, moments.values(), strict=True):
        optimizer.state[param] = {"exp_avg": moment, "exp_avg_sq": moment}
    due = {name: range(len(params)) for name in STATE_COLUMNS}
    host, device = PendingColumns(len(params)), PendingColumns(len(params))
    gradients = [torch.tensor([1.0, 2.0, 3.0, -4.0]).to(dtype) for dtype in moments]
    read_optimizer_state(host, due, params, optimizer, gradients)
    for module in (optimizer_moments, update_ratio, moment_cosine):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    with Operations() as operations:
        read_optimizer_state(device, due, params, optimizer, gradients)
    assert not [name for name in operations.names if name in WAITING]
    for name, column in host.columns().items():
        assert device.columns()[name].values == pytest.approx(column.values, rel=1e-6), name
        assert device.columns()[name].present.all()


@pytest.mark.parametrize("every", CADENCES)
def test_cosines_are_those_of_float64(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every gradient with the moment before the step, when it is due; none where one of the two is zero."""
    monkeypatch.setattr(staggered_reads, "SMALLEST_PART", 1)
    torch.manual_seed(0)
    model = Odd(torch.float32)
    rule = f"{{detect: {{kind: below, of: {COSINE}, threshold: 2}}, for: 1, every: {every}}}"
    rules = f"version: 1\nrules:\n  a: {rule}\n"
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    gradients: list[dict[str, np.ndarray]] = []
    params = dict(model.named_parameters())
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            {name: numbers(param.grad).copy() for name, param in params.items() if param.grad is not None}
        )
    )
    records, states, _ = trained(model, optimizer, rules, tmp_path)
    seen = 0
    for record, state, found in zip(records, states, gradients, strict=True):
        sites, step = record.snapshot.sites, record.snapshot.step
        wanted = {}
        for name, gradient in found.items():
            moment = numbers(state[name]["exp_avg"]) if name in state else np.zeros(1)
            size = float(np.linalg.norm(gradient) * np.linalg.norm(moment))
            if size > 0:
                wanted[name] = float(gradient @ moment) / size
        phases = staggered_reads.Staggering(np.maximum(sites.numels, 1)).phases(every)
        due = {sites.names[k] for k in np.flatnonzero(phases == step % every)}
        column = record.snapshot.columns.get(COSINE)
        present = {} if column is None else dict(zip(sites.names, column.values.tolist(), strict=True))
        for name in judged(record, "a"):
            assert present[name] == pytest.approx(wanted[name], abs=1e-6), (name, step)
        # What was zero when it was its turn is overdue, and judged at another step.
        assert wanted.keys() & (due if every > 1 else wanted.keys()) <= judged(record, "a") <= wanted.keys()
        seen += len(judged(record, "a"))
    assert seen > STEPS // every


@pytest.mark.parametrize(
    ("layout", "scale"),
    [("channels last", 1.0), ("transposed", 1.0), ("large", 1.0), ("small", 1e-25), ("large", 1e25)],
)
def test_cosines_of_layouts_and_ranges(layout: str, scale: float) -> None:
    """Elements are multiplied with those of their place, whatever lies next to them, and squares are held."""
    torch.manual_seed(3)
    moment = torch.randn(6, 8, 5, 5) if layout == "channels last" else torch.randn(300, 700)
    gradient = moment + torch.randn_like(moment)
    if layout == "channels last":
        gradient = gradient.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        gradient = gradient.t().contiguous().t()
    wanted = float(numbers(gradient) @ numbers(moment))
    wanted /= float(np.linalg.norm(numbers(gradient)) * np.linalg.norm(numbers(moment)))
    found = moment_cosine.cosines({0: moment * scale}, [gradient * scale])
    assert found[0] == pytest.approx(wanted, rel=1e-6)
    half = moment_cosine.cosines({0: moment}, [gradient.bfloat16()])
    assert half[0] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("first", [0.0, math.nan, math.inf])
def test_cosines_with_nothing_are_no_values(
    where: str, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of zeros and of what is not finite, also where a device only knows afterwards that it is so."""
    if where == "device":
        for module in (optimizer_moments, moment_cosine):
            monkeypatch.setattr(module, "on_host", lambda tensor: False)
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = torch.optim.Adam(params)
    for param in params:
        optimizer.state[param] = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    gradients = [torch.ones(3), torch.full((3,), first)]
    pending = PendingColumns(2)
    read_optimizer_state(pending, {COSINE: [0, 1]}, params, optimizer, gradients)
    column = pending.columns()[COSINE]
    assert column.present.tolist() == [True, False]
    assert column.values[0] == pytest.approx(1.0)


def test_cosines_that_have_no_meaning_are_left_out() -> None:
    """Of zeros, of sparse gradients, without a gradient, and of another shape."""
    ones = torch.ones(4)
    odd = [torch.zeros(4), torch.eye(4)[0].to_sparse(), None, torch.ones(5)]
    assert moment_cosine.cosines(dict.fromkeys(range(4), ones), odd) == {}
    assert moment_cosine.cosines({0: torch.zeros(4)}, [ones]) == {}


def numbers(moment: Tensor) -> np.ndarray:
    """The real numbers of a moment in float64."""
    return (torch.view_as_real(moment) if moment.is_complex() else moment).double().numpy().ravel()
