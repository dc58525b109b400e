"""pytorch/examples mnist_hogwild: a shared model, one optimizer in each of two processes (here one after the other)."""

import sys

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from digest import report
from torch import nn, optim


def train(rank, model, steps):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
        loss.backward()
        optimizer.step()
    print("rank", rank, "loss", loss.item(), flush=True)


if __name__ == "__main__":
    method = mp.get_context(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model.share_memory()
    for rank in range(2):
        p = method.Process(target=train, args=(rank, model, 7))
        p.start()
        p.join()
        print("exit", p.exitcode, flush=True)
    report(14, model)
