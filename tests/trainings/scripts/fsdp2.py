"""FSDP2 on two ranks: blocks sharded, then the root; a clip of DTensors; rank 0 prints its shards' hash.

With `again` a second optimizer takes over half-way.
"""

import os
import sys

import torch
import torch.distributed as dist
from digest import report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.relu(self.embed(x))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


model, mesh = Net(), init_device_mesh("cpu", (2,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(8):
    if step == 4 and "again" in sys.argv:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(2, 8, 4)[rank]
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    if rank == 0:
        print(step, loss.item(), norm.item(), flush=True)
dist.barrier()
if rank == 0:
    report(8, model)
dist.destroy_process_group()
