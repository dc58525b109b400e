"""Columns of what goes into modules and comes out: equal to float64 by hand, at their cadence; nothing else is read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.account.rules_without_data import NO_INPUT
from gradwatch.capture.columns.activation_values import OF_INPUTS, OF_OUTPUTS
from gradwatch.engine.judged_steps import staggered_reads
from gradwatch.inspect import ActivationStats
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from gradwatch.taps import module_calls
from tests.support import odd_activations
from tests.support.kept import Kept
from tests.support.module_calls import Elements, ModuleCalls

WITHOUT_OPTIMIZER: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "std": lambda values: values.std(correction=0),
    "min": torch.amin,
    "max": torch.amax,
    "near_zero": lambda values: (values.abs() < 1e-6).double().mean(),
}
COLUMNS = [f"{side}_{name}" for side in ("input", "activation") for name in WITHOUT_OPTIMIZER]


def rules_of(columns: list[str], every: int, tap: str = "output") -> str:
    """A rule on each of these columns that always breaches."""
    return f"version: 1\nmodules: {{tap: {tap}}}\nrules:\n" + "".join(
        f"  {column}: {{detect: {{kind: above, of: {column}, threshold: -1e30}}, for: 1, every: {every}}}\n"
        for column in columns
    )


def odd(rules: str | None, tmp_path: Path, steps: int) -> tuple[list[Record], ModuleCalls, list[Tensor]]:
    """Records of the training with odd activations, what went through its modules, and its weights at the end."""
    kept = Kept()

    def around(model: nn.Module, optimizer: torch.optim.Optimizer, train: Callable[[], None]) -> None:
        if rules is None:
            train()
            return
        with gradwatch.watch(
            model, optimizer, rules=parse_rules(rules), run_dir=tmp_path, sinks=[kept], strict=True
        ) as gw:
            train()
            assert gw.health.errors() == {}

    calls, weights = odd_activations.trained(steps, around)
    return kept.records, calls, weights


def of_column(record: Record, column: str) -> dict[str, float]:
    """Its values by the name of the module."""
    found = record.snapshot.columns.get(column)
    present = [] if found is None else np.flatnonzero(found.present).tolist()
    return {record.snapshot.sites.names[k]: float(found.values[k]) for k in present if found is not None}


def check(found: dict[str, float], now: Elements, statistic: str) -> None:
    """Equal to float64 by hand, as well as float32 holds what they are of."""
    for name, value in found.items():
        least = 1e-6 * float(now[name].abs().max()) if statistic in ("mean", "std") else 0.0
        wanted = float(WITHOUT_OPTIMIZER[statistic](now[name]))
        assert value == pytest.approx(wanted, rel=1e-6, abs=least), (name, statistic)


@pytest.mark.parametrize("every", [1, 3, 10])
def test_values_equal_float64_by_hand_and_are_read_when_due(every: int, tmp_path: Path) -> None:
    """Inputs and outputs of sixteen odd modules: at their turn, or where they had none, until they are judged."""
    records, calls, _ = odd(rules_of(COLUMNS, every), tmp_path, 34)
    sites = records[0].snapshot.sites
    modules = [name for name, kind in zip(sites.names, sites.kinds, strict=True) if kind == "module"]
    phases = staggered_reads.Staggering(np.zeros(len(modules), np.int64)).phases(every)
    for column in COLUMNS:
        side, statistic = column.split("_", 1)
        overdue: list[set[str]] = [set(), set()]  # after each step
        read: set[str] = set()
        for record, now in zip(records, calls.inputs if side == "input" else calls.outputs, strict=True):
            step = record.snapshot.step
            in_turn = {name for name, phase in zip(modules, phases, strict=True) if phase == step % every}
            # What is overdue is read from the second step after: it is known when the next one has been judged.
            found = of_column(record, column)
            assert found.keys() == (in_turn | (overdue[-2] if every > 1 else set())) & now.keys()
            overdue.append((in_turn | overdue[-1]) - found.keys())
            check(found, now, statistic)
            read |= found.keys()
        without = {"never", "evaluated", "evaluated.0", *(["embedding"] if side == "input" else [])}
        assert read == set(modules) - without


def test_an_input_is_read_before_the_forward_writes_to_it(tmp_path: Path) -> None:
    """Of an in-place ReLU the input has negative elements, and its output none."""
    records, _, _ = odd(rules_of(["input_min", "activation_min"], 1), tmp_path, 2)
    assert of_column(records[0], "input_min")["in_place"] < 0
    assert of_column(records[0], "activation_min")["in_place"] == 0


def test_an_odd_training_is_bit_identical(tmp_path: Path) -> None:
    """Weights end as without a watch, with every column of inputs and outputs, and histograms, at each step."""
    rules = rules_of(COLUMNS, 1) + "histograms: {of: [activations], every: 1}\n"
    assert all(map(torch.equal, odd(None, tmp_path, 6)[2], odd(rules, tmp_path, 6)[2]))


def plain(rules: str | None, tmp_path: Path) -> tuple[list[Record], list[Tensor]]:
    """Records and weights of a training that works nowhere in place, so that either tap can be had."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 2))
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), Kept()
    watch = (
        contextlib.nullcontext()
        if rules is None
        else gradwatch.watch(model, optimizer, rules=parse_rules(rules), run_dir=tmp_path, sinks=[kept])
    )
    with watch:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
    return kept.records, [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("tap", ["output", "full_backward"])
def test_training_is_bit_identical_under_either_tap(tap: str, tmp_path: Path) -> None:
    """Both taps see inputs and outputs, of each module and the model at each step, and change no weight."""
    rules = rules_of(COLUMNS, 1, tap) + "histograms: {of: [activations], every: 1}\n"
    records, weights = plain(rules, tmp_path)
    assert all(len(of_column(record, column)) == 5 for record in records for column in COLUMNS)
    assert all(len(record.snapshot.histograms) == 5 for record in records)
    assert all(map(torch.equal, weights, plain(None, tmp_path)[1]))


def test_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    """A validation between forward and step, or between two steps, moves no column; `ActivationStats` sees it apart."""
    model, kept = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls, rules = ModuleCalls([model]), parse_rules(rules_of(COLUMNS, 1))
    validations = []
    with (
        gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[kept]),
        ActivationStats(model, mode="eval") as evaluated,
    ):
        for _ in range(4):
            calls.begin()
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().sum()
            for between in (loss.backward, optimizer.step):
                model.eval()
                with torch.no_grad():
                    validations.append(float(model(torch.randn(2, 3) + 100.0).mean()))
                model.train()
                between()
    for column in COLUMNS:
        side, statistic = column.split("_", 1)
        for record, now in zip(kept.records, calls.inputs if side == "input" else calls.outputs, strict=True):
            assert of_column(record, column).keys() == {"Sequential", "0", "1"}
            check(of_column(record, column), now, statistic)
    assert [one.mean for one in evaluated.of["1"]] == pytest.approx(validations)


@pytest.mark.parametrize("asked", ["input_mean", "activation_mean", "running_var_max"])
def test_only_what_rules_ask_for_is_listened_to(asked: str, tmp_path: Path) -> None:
    """Calls cost nothing before the forward where no input is asked for, nor after it where no output is."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = parse_rules(rules_of([asked], 10))
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]):
        listened = module_calls._listened.get(id(model[0]))
        before, after = ([], []) if listened is None else (listened.before, listened.after)
        assert (len(before), len(after)) == (asked in OF_INPUTS, asked in OF_OUTPUTS)


def test_an_input_that_never_comes_is_listed(tmp_path: Path) -> None:
    """A module that is given whole numbers only has no column of its input, and the account says why."""
    model = nn.Sequential(nn.Embedding(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = parse_rules(rules_of(["input_mean", "activation_mean"], 1).replace("tap: output", 'names: ["0"]'))
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        assert dict(session_of(gw).account().no_data) == {"input_mean": NO_INPUT}


def test_no_input_outlives_its_step(tmp_path: Path) -> None:
    """What was read of is freed with the script's own references."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(
        model, optimizer, rules=parse_rules(rules_of(COLUMNS, 1)), run_dir=tmp_path, sinks=[Kept()]
    ):
        x = torch.ones(4, 3)
        out = model(x)
        out.sum().backward()
        gone = [weakref.ref(x), weakref.ref(out)]
        del x, out
        assert [one() for one in gone] == [None, None]
        optimizer.step()
