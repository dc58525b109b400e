"""The last look at the weights, as a watch or its process ends: what the checkpoint tag says from then on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.checkpoint import read_tag
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

SCRIPT = """
import torch
from torch import nn
def main():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if step == 29:
            optimizer.param_groups[0]["lr"] = float("nan")
        optimizer.step()
    return model, optimizer
KEPT = main()
"""


def test_weights_that_the_last_step_ruined_are_not_called_healthy(tmp_path: Path) -> None:
    """Its gradients were finite, and no look was due after it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path) as gw:
        for step in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            if step == 29:
                optimizer.param_groups[0]["lr"] = float("nan")
            optimizer.step()
    found = read_tag(gw.run.directory)
    assert not found.healthy
    assert "weights are not finite" in found.reasons[0]


def test_weights_of_a_healthy_end_were_looked_at(tmp_path: Path) -> None:
    """The tag names the last step as the one after which the weights were seen."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path) as gw:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    found = read_tag(gw.run.directory)
    assert found.healthy
    assert found.weights_step == 29


@pytest.mark.parametrize("kept", [True, False])
def test_at_the_end_of_a_script_weights_are_looked_at_or_it_is_said(kept: bool, tmp_path: Path) -> None:
    """Where the model is gone by then, nothing is claimed of it."""
    (tmp_path / "x.py").write_text(SCRIPT if kept else SCRIPT.replace("KEPT = main()", "main()"))
    done = warm.run([*GRADWATCH, "run", "--", sys.executable, "x.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (path for path in (tmp_path / "gradwatch-runs").iterdir() if path.is_dir())
    found = read_tag(run)
    report = warm.run([*GRADWATCH, "report", "--format", "md"], tmp_path).stdout
    if kept:
        assert not found.healthy
        assert "weights after step 29 are not healthy (weights are not finite: " in report
    else:
        assert found.weights_step is None
        assert "its weights were not looked at" in report
