"""FSDP2 in a world of one: every fact is at hand, so the default pack acts. Two ranks: `tests/ranks`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import warm

CODE = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", 1), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
import gradwatch

class Collector:
    name = "collector"
    records = []
    def open(self, run, health): pass
    def write(self, record): self.records.append(record)
    def flush(self, timeout): return True
    def close(self): pass

with gradwatch.watch(model, optimizer, rules="default", sinks=[Collector()], run_dir=sys.argv[1]) as gw:
    for scale in (1.0, 1.0, float("nan")):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).pow(2).sum() * scale).backward()
        optimizer.step()
    finite, last = Collector.records[1], Collector.records[2]
    assert finite.snapshot.total_norm > 0
    assert "non-finite" in last.verdict.firing
    assert last.decision.skip
    assert gw.health.errors() == {}, gw.health.errors()
assert all(p.to_local().isfinite().all() for p in model.parameters())
dist.destroy_process_group()
print("ok")
"""


def test_a_sharded_step_is_skipped(tmp_path: Path) -> None:
    """A NaN on shards fires the rule, and the optimizer step is skipped."""
    done = warm.run([sys.executable, "-c", CODE, str(tmp_path)])
    assert done.stdout.strip() == "ok", done.stderr
