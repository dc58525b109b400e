"""A framework that starts its own ranks: each is known by its rank, and only rank 0 prints."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gradwatch.journal import read_journal
from gradwatch.records.snapshot import Snapshot
from tests.integrations.test_frameworks import slope
from tests.launch.test_training import execute_warm
from tests.support.framework_jobs import MAX_NORM, examples, network
from tests.support.launch_cases import GRADWATCH, ROOT

RULES = """
version: 1
rules:
  always: {detect: {kind: above, of: total_norm, threshold: 0}, severity: warning}
"""
# Lightning's launcher starts the script again for rank 1, with LOCAL_RANK but no RANK in its environment.
TRAIN = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, ROOT)
import os, torch
torch.set_num_threads(1)
from tests.support import framework_jobs
mine = framework_jobs.examples()[int(os.environ.get("LOCAL_RANK", 0))::2]
framework_jobs.loader = lambda: torch.utils.data.DataLoader(mine, batch_size=2)
CALLBACKS
two_ranks = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
framework_jobs.lightning(callbacks, max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0, **two_ranks)
"""
CALLBACK = """
from gradwatch.integrations.lightning import GradwatchCallback
callbacks = [GradwatchCallback(rules="always.gradwatch.yaml", run_dir="runs", listen="127.0.0.1:0")]
"""


def first_steps_by_hand(count: int) -> list[dict[str, float]]:
    """Norms of the gradient averaged over two ranks, two batches each, of steps clipped and taken as in the job."""
    weights = {name: tensor.double().numpy().copy() for name, tensor in network().state_dict().items()}
    pairs = examples()
    inputs = np.stack([x.double().numpy() for x, _ in pairs])
    targets = np.stack([y.double().numpy() for _, y in pairs])
    found = []
    for step in range(count):
        batches = [
            slice(8 * step + 4 * micro + rank, 8 * step + 4 * micro + rank + 4, 2)
            for rank in (0, 1)
            for micro in (0, 1)
        ]
        parts = [slope(weights, inputs[batch], targets[batch]) for batch in batches]
        gradient = {name: sum(part[name] for part in parts) / 4 for name in weights}
        found.append(
            {f"net.{name}": float(np.sqrt(np.square(each).sum())) for name, each in gradient.items()}
        )
        total = np.sqrt(sum(value**2 for value in found[-1].values()))
        scale = min(1.0, MAX_NORM / (total + 1e-6))
        weights = {name: weights[name] - 0.05 * scale * gradient[name] for name in weights}
    return found


def by_rank(tmp_path: Path) -> dict[int, list[Snapshot]]:
    (folder,) = (each for each in (tmp_path / "runs").iterdir() if each.is_dir())
    journals = read_journal(folder)
    assert len(journals) == 2
    return {one.rank: [recorded.record.snapshot for recorded in one.records()] for one in journals}


@pytest.mark.parametrize(
    "unmodified",
    [
        pytest.param(False, id="callback"),
        pytest.param(True, id="launcher", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_lightning_starts_itself(unmodified: bool, tmp_path: Path) -> None:
    """Both ranks report the reduced gradient, worked out by hand, under their own rank; one of them prints."""
    (tmp_path / "always.gradwatch.yaml").write_text(RULES)
    imports = "callbacks = []" if unmodified else CALLBACK
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("CALLBACKS", imports).replace("ROOT", repr(ROOT)))
    launcher = [*GRADWATCH, "run", "--rules", "always.gradwatch.yaml", "--dir", "runs"]
    command = [*launcher, "--listen", "127.0.0.1:0", "--"] if unmodified else []
    done = execute_warm([*command, sys.executable, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = by_rank(tmp_path)
    assert sorted(ranks) == [0, 1]
    expected = first_steps_by_hand(2)
    for snapshots in ranks.values():
        assert len(snapshots) == 3
        for snapshot, norms in zip(snapshots, expected, strict=False):
            reported = dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))
            assert reported == pytest.approx(norms, rel=2e-5)
            assert snapshot.total_norm_applied == pytest.approx(MAX_NORM, rel=1e-4)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "always" in line]
    assert len([line for line in said if "gradwatch firing" in line]) == 1, said
    assert len(said) == 2, said  # the other is the account of the job
