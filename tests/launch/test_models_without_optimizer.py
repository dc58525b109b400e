"""Models that no optimizer has, beside one that has: found by `gradwatch run` in an unmodified script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwatch.taps.graph.leaves import leaves
from tests.support import warm
from tests.support.launch_cases import GRADWATCH, bare_and_watched

BOTH_SIDES = """
import torch
torch.manual_seed(0)
made, judge = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(judge.parameters(), 0.05)
def by_hand(model, loss):
    for p in model.parameters(): p.grad = None
    loss.backward()
    for p in model.parameters(): p.data.add_(p.grad, alpha=-0.05)
for _ in range(20):
    optimizer.zero_grad()
    judge(made(torch.randn(3, 4)).detach()).mean().backward()
    optimizer.step()
    by_hand(made, judge(made(torch.randn(3, 4))).square().mean())
late = torch.nn.Linear(4, 1)
for _ in range(30): by_hand(late, late(torch.randn(3, 4)).square().mean())
image = torch.zeros(4, requires_grad=True)
for _ in range(7): (image * 2).sum().backward()
print("weights", made.weight.tolist(), judge.weight.tolist(), late.weight.tolist())
"""


def test_what_is_trained_by_hand_beside_an_optimizer_is_observed(tmp_path: Path) -> None:
    """One side of a GAN and a later model are observed; backwards that reach no model are told."""
    _, watched = bare_and_watched(BOTH_SIDES, tmp_path)
    assert "20 of 20 steps watched, 50 windows without an optimizer" in watched.stderr
    assert "50 windows of gradients belong to no torch optimizer" in watched.stderr
    assert "7 of 77 backwards reached no parameter that is watched" in watched.stderr


@pytest.mark.parametrize("reentrant", [False, True])
def test_leaves_are_those_that_a_backward_fills(reentrant: bool) -> None:
    """Each once, through shared parts, views and non-reentrant checkpoints; frozen ones and inputs of none are not."""
    model, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    x = torch.randn(2, 3, requires_grad=True)
    inner = nn.Linear(3, 3)
    y = model(frozen(model(x))).view(3, 2).t()
    y = y.reshape(2, 3) + checkpoint(inner, model(x), use_reentrant=reentrant)
    found = leaves([y.sum(), y.mean()])
    wanted = [x, *model.parameters(), *(() if reentrant else inner.parameters())]
    assert sorted(map(id, found)) == sorted(map(id, wanted))
    assert leaves([x]) == [x]
    assert leaves([torch.ones(2)]) == []


SHARDED = """
import os, torch
import torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.fsdp import fully_shard
model = torch.nn.Linear(4, 1)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_copies_of_shards_are_no_model_without_an_optimizer(tmp_path: Path) -> None:
    """A backward under FSDP2 fills parameters that are in no optimizer: they are those of the shards that are."""
    (tmp_path / "train.py").write_text(SHARDED)
    done = warm.run([*GRADWATCH, "run", "--", sys.executable, "train.py"], tmp_path, check=True)
    assert "gradwatch: 5 of 5 steps watched" in done.stderr
    assert "without an optimizer" not in done.stderr
    assert "no torch optimizer" not in done.stderr
