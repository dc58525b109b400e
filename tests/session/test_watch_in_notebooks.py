"""A watch draws itself in a notebook: the report of the run so far."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import gradwatch
from gradwatch.sinks.journal import JournalSink
from tests.support.kept import Kept


def trained(gw: gradwatch.Watch, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """What a notebook shows after three steps."""
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return gw._repr_html_()


def test_the_report_so_far(tmp_path: Path) -> None:
    """With the steps taken, though the run goes on; without a journal in words."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = gradwatch.load_rules("observe-only")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[], run_dir=tmp_path) as gw:
        assert trained(gw, model, optimizer).startswith("<p>gradwatch: no report of this run: ")
    sinks = [Kept(), JournalSink()]
    with gradwatch.watch(model, optimizer, rules=rules, sinks=sinks, run_dir=tmp_path) as gw:
        shown = trained(gw, model, optimizer)
    assert shown.startswith("<iframe")
    assert "So far: no rule fired in 3 recorded steps" in shown
