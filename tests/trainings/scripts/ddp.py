"""torchrun's way: DistributedDataParallel on two ranks, a DistributedSampler, no_sync accumulation, rank 0 prints."""

import os

import torch
import torch.distributed as dist
from digest import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if i % 2 == 0:
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
            continue
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    if rank == 0:
        print("epoch", epoch, "loss", loss.item(), flush=True)
dist.barrier()
if rank == 0:
    report(steps, net)
dist.destroy_process_group()
