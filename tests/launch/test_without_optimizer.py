"""A script that trains without an optimizer, unmodified, under `gradwatch run`."""

from __future__ import annotations

import sys
from pathlib import Path

from gradwatch.journal import read_journal
from tests.launch.test_training import environment, execute_warm
from tests.support import warm
from tests.support.launch_cases import GRADWATCH, bare_and_watched
from tests.support.ports import free_port

SCRIPT = """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(4, 1)
for t in range(10):
    x = torch.randn(8, 4)
    loss = (m(x) ** 2).mean() if t < 7 else m(x).mean() * float("nan")
    m.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.25)
    for p in m.parameters():
        p.data.add_(p.grad, alpha=-0.1)
print("weights", m.weight.data.tolist())
"""


def test_sgd_written_by_hand_is_observed_step_by_step(tmp_path: Path) -> None:
    """Ten steps are ten windows, the NaN is told at its own, backwards are counted once, stdout is the bare one's."""
    _, watched = bare_and_watched(SCRIPT, tmp_path)
    assert "0 of 0 steps watched, 10 windows without an optimizer" in watched.stderr
    assert "10 backwards and no step of a torch optimizer seen" in watched.stderr
    assert "observed only" in watched.stderr
    assert "rule=non-finite severity=critical step=7" in watched.stderr


RANKS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
m = torch.nn.Linear(4, 1)
batches = torch.Generator().manual_seed(rank)
for t in range(12):
    loss = m(torch.randn(8, 4, generator=batches)).pow(2).mean()
    m.zero_grad()
    (loss * float("nan") if (t, rank) == (10, 1) else loss).backward()
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.data.add_(p.grad / 2, alpha=-0.1)
    if t == 9:
        print(f"rank {rank}: {m.weight.data.tolist()}\\n", end="", flush=True)
dist.destroy_process_group()
"""

SECONDS = 120


def test_ranks_that_average_and_move_weights_by_hand_are_observed_each(tmp_path: Path) -> None:
    """Two ranks without an optimizer: every window of both, the NaN of one at its step, and why nothing is done."""
    (tmp_path / "x.py").write_text(RANKS)
    port = free_port()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={port}",
        "x.py",
    ]
    surroundings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        warm.Process([sys.executable, "x.py"], str(tmp_path), environment(**surroundings, RANK=rank))
        for rank in ("0", "1")
    ]
    bare = [one.communicate(SECONDS) for one in started]
    options = ["--dir", str(tmp_path / "runs"), "--run-id", "r", "--listen", "127.0.0.1:0"]
    done = execute_warm([*GRADWATCH, "run", *options, "--", *torchrun], tmp_path)
    assert [status for status, _, _ in bare] == [0, 0], bare
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [line for _, said, _ in bare for line in said.splitlines()]
    journals = sorted(read_journal(tmp_path / "runs" / "r"), key=lambda journal: journal.rank)
    assert [journal.rank for journal in journals] == [0, 1]
    for journal in journals:
        records = [one.record for one in journal.records()]
        assert [one.snapshot.step for one in records] == list(range(12))
        assert {one.snapshot.provisional for one in records} == {False}
        events = [(event.rule, event.kind, event.step) for one in records for event in one.verdict.events]
        assert ("non-finite", "firing", 10) in events
        assert not any(rule == "non-finite" and step < 10 for rule, _, step in events)
    assert "0 of 0 steps watched, 12 windows without an optimizer" in done.stderr
    assert "ranks are not compared where no torch optimizer steps" in done.stderr
    assert "actions are not carried out here: no torch optimizer steps these weights" in done.stderr
    assert "did not agree" not in done.stderr
