"""The last look at the weights, as a watch or its process ends: what the checkpoint tag says from then on."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.capture.weights.weight_health import Weights
from gradwatch.checkpoint import read_tag
from gradwatch.journal import read_journal
from gradwatch.journal.entries import EndEntry
from tests.support import warm
from tests.support.kept import Kept
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


@pytest.mark.parametrize("last_rate", [0.01, float("nan")])
def test_the_tag_is_of_the_weights_after_the_last_step(last_rate: float, tmp_path: Path) -> None:
    """Where that ruins them, with finite gradients, no look was due after it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path) as gw:
        for step in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            if step == 29:
                optimizer.param_groups[0]["lr"] = last_rate
            optimizer.step()
    found = read_tag(gw.run.directory)
    if math.isfinite(last_rate):
        assert found.healthy
        assert found.weights_step == 29
    else:
        assert not found.healthy
        assert "weights are not finite" in found.reasons[0]


def test_the_account_is_given_where_the_last_look_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails there is an internal error, and the end of the journal has the account."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def broken(_: Weights) -> tuple[str, ...]:
        raise RuntimeError("broken")

    with gradwatch.watch(model, optimizer, run_dir=tmp_path, strict=True) as gw:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        monkeypatch.setattr(Weights, "check", broken)
    (journal,) = read_journal(Path(gw.run.directory))
    (*_, end) = journal.entries()
    assert isinstance(end, EndEntry)
    assert end.account["watched"]["steps"] == 1


def test_a_look_at_all_weights_is_as_of_the_last_step_of_any_optimizer(tmp_path: Path) -> None:
    """One that was made late has counted fewer steps."""
    models = [nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    with gradwatch.watch(models, optimizers, run_dir=tmp_path) as gw:
        for step in range(10):
            for model, optimizer in list(zip(models, optimizers, strict=True))[: 2 if step > 5 else 1]:
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    found = read_tag(gw.run.directory)
    assert (found.healthy, found.weights_step) == (True, 9)


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


@pytest.mark.parametrize("mended", [True, False])
def test_a_new_optimizer_of_weights_that_were_reloaded_is_not_poisoned(mended: bool) -> None:
    """NaN reached the one before: no state of the new one holds it, so the weights say whether a checkpoint is good."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, good = torch.optim.Adam(model.parameters(), 0.01), copy.deepcopy(model.state_dict())
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[Kept()]) as gw:
        for step in range(8):
            optimizer.zero_grad()
            (model(torch.randn(4, 3)).sum() * (math.nan if step == 3 else 1.0)).backward()
            optimizer.step()
            if step == 5:
                assert not gw.healthy
                if mended:
                    model.load_state_dict(good)
                optimizer = torch.optim.Adam(model.parameters(), 0.01)
        assert gw.healthy == mended
