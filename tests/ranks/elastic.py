"""A training script for torchrun: rank 1 of the first attempt dies; the second attempt trains to the end.

Argument: the folder for results. It knows nothing of gradwatch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


def main(folder: str) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    # torchrun keeps its store over a restart, and gloo would find the addresses of the first attempt in it.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"attempt{attempt}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        if (attempt, rank, step) == (0, 1, 3):
            sys.exit(7)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 6, generator=generator)
        if rank == 1 and step == 4:
            x[0, 0] = float("nan")
        model(x).square().mean().backward()
        optimizer.step()
    weights = [float(param.detach().double().sum()) for param in model.parameters()]
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"weights": weights, "attempt": attempt}), encoding="utf-8"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
