"""One conformance test for every framework, both ways in: through its integration, and unmodified.

The numbers are compared with a training worked out by hand: numpy, float64, backward written down.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gradwatch.journal import read_journal
from gradwatch.records.snapshot import Snapshot
from tests.launch.test_training import execute_warm
from tests.support import framework_jobs
from tests.support.framework_jobs import (
    ACCUMULATE,
    BATCH,
    BATCHES,
    EPOCHS,
    JOBS,
    LR,
    MAX_NORM,
    digest,
    examples,
    network,
)
from tests.support.kept import Kept
from tests.support.launch_cases import GRADWATCH

Gradient = dict[str, NDArray[np.float64]]
pytestmark = pytest.mark.usefixtures("framework_folder")

WINDOWS = (2, 2, 2, 2, 1)  # batches of each optimizer step of an epoch
FRAMEWORKS = tuple(JOBS)


def by_hand(own_divisor: bool) -> Iterator[tuple[Gradient, float]]:
    """(gradient before clipping, its total norm) of every step of the job.

    `own_divisor`: whether a window's loss is divided by the batches it has, or always by ACCUMULATE.
    """
    weights = {name: tensor.double().numpy().copy() for name, tensor in network().state_dict().items()}
    pairs = examples()
    inputs = np.stack([x.double().numpy() for x, _ in pairs]).reshape(BATCHES, BATCH, -1)
    targets = np.stack([y.double().numpy() for _, y in pairs]).reshape(BATCHES, BATCH, -1)
    for _ in range(EPOCHS):
        batch = 0
        for window in WINDOWS:
            divisor = window if own_divisor else ACCUMULATE
            parts = [slope(weights, inputs[k], targets[k]) for k in range(batch, batch + window)]
            gradient = {name: sum(part[name] for part in parts) / divisor for name in weights}
            total = float(np.sqrt(sum(np.square(each).sum() for each in gradient.values())))
            yield gradient, total
            scale = min(1.0, MAX_NORM / (total + 1e-6))  # torch.nn.utils.clip_grad_norm_
            weights = {name: weights[name] - LR * scale * gradient[name] for name in weights}
            batch += window


def slope(weights: Gradient, x: NDArray[np.float64], y: NDArray[np.float64]) -> Gradient:
    """d/dw of mean((out(tanh(hidden(x))) - y)²)."""
    hidden = np.tanh(x @ weights["hidden.weight"].T + weights["hidden.bias"])
    error = 2 * (hidden @ weights["out.weight"].T + weights["out.bias"] - y) / y.size
    inner = (error @ weights["out.weight"]) * (1 - hidden**2)
    return {
        "hidden.weight": inner.T @ x,
        "hidden.bias": inner.sum(0),
        "out.weight": error.T @ hidden,
        "out.bias": error.sum(0),
    }


def conforms(framework: str, snapshots: list[Snapshot]) -> None:
    """The shared test: what was reported of every step is what was worked out by hand."""
    expected = list(by_hand(own_divisor=framework == "transformers"))
    assert [snapshot.step for snapshot in snapshots] == list(range(len(expected)))
    for snapshot, (gradient, total) in zip(snapshots, expected, strict=True):
        names = [name.removeprefix("net.") for name in snapshot.sites.names]
        assert names == list(gradient)
        norms = np.array([np.sqrt(np.square(gradient[name]).sum()) for name in names])
        scale = min(1.0, MAX_NORM / (total + 1e-6))
        applied = snapshot.column("norm_applied")
        assert applied is not None
        # 1e-5 for the norm itself; the job's own float32 weights have wandered off by as much again.
        np.testing.assert_allclose(snapshot.norm, norms, rtol=2e-5)
        np.testing.assert_allclose(snapshot.total_norm, total, rtol=2e-5)
        np.testing.assert_allclose(applied.values, norms * scale, rtol=2e-5)
        np.testing.assert_allclose(snapshot.total_norm_applied, total * scale, rtol=2e-5)
        assert (snapshot.calls > 0).all()
        assert not snapshot.provisional, snapshot.step


def integrated(framework: str, **options: Any) -> tuple[Any, Callable[[], Any]]:
    """(what a job takes as `watched`, a call that gives its Watch) for a framework's integration."""
    module = import_module(f"gradwatch.integrations.{framework}")
    if hasattr(module, "GradwatchCallback"):
        callback = module.GradwatchCallback(**options)
        return [callback], lambda: callback.gw
    made: list[Any] = []

    def around(*parts: Any) -> AbstractContextManager[Any]:
        made.append(module.watch(*parts, **options))
        return made[0]  # type: ignore[no-any-return]

    return around, lambda: made[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_integration_reports_the_norms_worked_out_by_hand(framework: str) -> None:
    """Pre-clip norms over accumulated batches, the partial last window included, and the post-clip ones."""
    sink = Kept()
    watched, watch = integrated(framework, rules="default", sinks=[sink], strict=True)
    JOBS[framework](watched)
    conforms(framework, [record.snapshot for record in sink.records])
    assert watch().health.errors() == {}
    assert not watch().status()["active"]  # closed with the job
    assert all("loss" in record.snapshot.scalars for record in sink.records)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_integration_changes_no_bit(framework: str) -> None:
    """Weights and every random generator are those of the same job without it."""

    def left_behind(watched: Any = None) -> tuple[str, bytes, Any, bytes]:
        random.seed(3)
        np.random.seed(3)
        weights = digest(JOBS[framework]() if watched is None else JOBS[framework](watched))
        generator = torch.get_rng_state().numpy().tobytes()
        return weights, generator, random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]

    watched, _ = integrated(framework, rules="default", run_dir="runs", listen="127.0.0.1:0", strict=True)
    assert left_behind(watched) == left_behind()


@pytest.mark.parametrize(
    "framework",
    # The launcher cannot tell Lightning's two package names apart.
    [
        pytest.param(name, marks=pytest.mark.soak if name == "pytorch_lightning" else ())
        for name in FRAMEWORKS
    ],
)
def test_the_unmodified_job_conforms_under_the_launcher(framework: str, tmp_path: Path) -> None:
    """`gradwatch run` in front of an unchanged script: same norms, output and weights; stderr gains the account."""
    script = framework_jobs.__file__
    assert "import gradwatch" not in Path(script).read_text(encoding="utf-8")
    launcher = [*GRADWATCH, "run", "--dir", "runs", "--run-id", "r", "--listen", "127.0.0.1:0", "--"]
    done = execute_warm([*launcher, sys.executable, script, framework], tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"weights {digest(JOBS[framework]())}"
    (journal,) = read_journal(tmp_path / "runs" / "r")
    conforms(framework, [recorded.record.snapshot for recorded in journal.records()])
    (account,) = [line for line in done.stderr.splitlines() if "gradwatch" in line]
    assert account.startswith(f"gradwatch: {EPOCHS * len(WINDOWS)} of {EPOCHS * len(WINDOWS)} steps watched")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_off_means_off(framework: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With GRADWATCH=0 the integration may stay in the script: nothing is watched, nothing written."""
    monkeypatch.setenv("GRADWATCH", "0")
    watched, watch = integrated(framework)
    bare = digest(JOBS[framework]())
    before = set(os.listdir(tmp_path))
    assert digest(JOBS[framework](watched)) == bare
    assert watch().status()["steps"] == 0
    assert set(os.listdir(tmp_path)) == before
