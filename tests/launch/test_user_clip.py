"""`gradwatch run` and loops that clip: met at the first clip, so that the very first step is known unclipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwatch.journal import read_journal
from gradwatch.records.snapshot import Snapshot
from tests.launch.test_training import run

TRAIN = """
import torch
from torch.nn.utils import clip_grad_norm_
torch.set_num_threads(1)
torch.manual_seed(0)
BEFORE
models = [torch.nn.Linear(4, 3) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for step in range(3):
    for model, optimizer in zip(models, optimizers):
        for micro in range(2):
            model(torch.ones(2, 4) * (micro + 1)).square().mean().backward()
        wide = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        print("norm", float(wide.norm()))
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
"""


def journalled(tmp_path: Path) -> list[Snapshot]:
    (journal,) = read_journal(tmp_path / "runs" / "r")
    snapshots = [recorded.record.snapshot for recorded in journal.records()]
    return sorted(snapshots, key=lambda snapshot: (snapshot.step, snapshot.optimizer))


def test_the_first_step_of_a_loop_that_clips_is_known_before_its_clip(tmp_path: Path) -> None:
    """Total norms equal the script's own, float64 and unclipped, from step 0 on, for two models in one loop."""
    done = run(tmp_path, TRAIN.replace("BEFORE", ""))
    assert done.returncode == 0, done.stderr
    truth = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("norm")]
    snapshots = journalled(tmp_path)
    assert [snapshot.step for snapshot in snapshots] == [0, 0, 1, 1, 2, 2]
    assert [snapshot.total_norm for snapshot in snapshots] == pytest.approx(truth, rel=1e-5)
    assert [snapshot.total_norm_applied for snapshot in snapshots] == pytest.approx([0.1] * 6, rel=1e-3)
    assert not any(snapshot.provisional for snapshot in snapshots)


BEFORE = """
loose = torch.ones(3, requires_grad=True)
loose.sum().backward()
for _ in range(5):
    clip_grad_norm_([loose], 1.0)
"""


def test_clipping_that_is_no_training_changes_nothing(tmp_path: Path) -> None:
    """Gradients that no optimizer has are clipped before any is made: the first step after is known all the same."""
    done = run(tmp_path, TRAIN.replace("BEFORE", BEFORE))
    assert done.returncode == 0, done.stderr
    snapshots = journalled(tmp_path)
    assert len(snapshots) == 6
    assert not any(snapshot.provisional for snapshot in snapshots)


def test_a_policy_that_cannot_be_carried_out_is_said_once(tmp_path: Path) -> None:
    """Where the first clip attaches: one line at the start, one account, the script runs to its end as without us."""
    (tmp_path / "none.gradwatch.yaml").write_text(
        "version: 1\nclip: {total: {method: autoclip, scope: param, history: 100000000}}\n"
    )
    done = run(tmp_path, TRAIN.replace("BEFORE", ""), options=("--rules", "none.gradwatch.yaml"))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 6
    assert len([line for line in done.stderr.splitlines() if "autoclip would keep" in line]) == 2, done.stderr
    assert "not armed: clip:total" in done.stderr.splitlines()[-1]


COPIES = """
import copy, pickle, torch
from torch.nn.utils import clip_grad_norm_
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
pair = model, torch.optim.Adam(model.parameters(), lr=0.1)
kept = [copy.deepcopy(pair)]  # never trained
for again in (copy.deepcopy, copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
    model, optimizer = pair = again(pair)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        print("norm", float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()))
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
"""


def test_a_copied_optimizer_is_known_before_its_first_clip(tmp_path: Path) -> None:
    """With its model, or unpickled: total norms equal the script's own, unclipped; one only kept is not met."""
    done = run(tmp_path, COPIES)
    assert done.returncode == 0, done.stderr
    truth = [float(line.split()[1]) for line in done.stdout.splitlines()]
    (journal,) = read_journal(tmp_path / "runs" / "r")
    snapshots = [recorded.record.snapshot for recorded in journal.records()]
    assert [snapshot.total_norm for snapshot in snapshots] == pytest.approx(truth, rel=1e-5)
    assert [snapshot.total_norm_applied for snapshot in snapshots] == pytest.approx([0.1] * 6, rel=1e-3)
    assert "3 optimizers" in done.stderr
