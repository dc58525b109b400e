"""The comparison of two checkouts sees every number of a Record, and nothing that differs from run to run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import gradwatch
from tests.golden.__main__ import first_difference
from tests.golden.document import line
from tests.golden.kept import kept, write
from tests.support.kept import Kept


def trained(seed: int) -> list[str]:
    """The lines of a training of three steps."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kept() as lines, gradwatch.watch(model, optimizer, rules="observe-only", sinks=[Kept()]):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).pow(2).mean().backward()
            optimizer.step()
    return lines


def test_the_same_training_gives_the_same_lines_and_another_does_not() -> None:
    """Time and cost are left out, and nothing else; what differs first is named."""
    once = trained(0)
    assert once == trained(0)
    assert len(once) == 3
    assert {"snapshot", "verdict", "decision", "checkpoint", "findings"} == json.loads(once[0]).keys()
    assert first_difference(once, trained(1)).startswith("Record 0: snapshot.")
    assert first_difference(once, once[:2]) == "3 Records, then 2"


def test_a_single_number_and_a_nan_are_seen() -> None:
    """One last bit of a norm, and NaN, which is equal to itself here."""
    sink = Kept()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[sink]):
        (model(torch.full((1, 2), float("nan")))).sum().backward()
        optimizer.step()
    (record,) = sink.records
    assert line(record) == line(record)
    assert '"nan"' in line(record)
    nudged = replace(record, snapshot=replace(record.snapshot, coverage=0.999))
    assert first_difference([line(record)], [line(nudged)]) == "Record 0: snapshot.coverage: 1.0 → 0.999"


def test_a_situation_without_records_writes_no_file(tmp_path: Path) -> None:
    """So that a situation which ceases to give Records differs from one that gives them."""
    write(tmp_path / "area", "a/b", ["{}"])
    write(tmp_path / "area", "none", [])
    assert [path.name for path in (tmp_path / "area").iterdir()] == ["a-b.jsonl"]
