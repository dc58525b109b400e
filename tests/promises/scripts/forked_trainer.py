"""Hogwild: children forked from a parent that has trained go on training the shared model."""

import torch
import torch.multiprocessing as mp

torch.manual_seed(0)
m = torch.nn.Linear(4, 1)
m.share_memory()
o = torch.optim.SGD(m.parameters(), 0.01)


def train(n):
    for _ in range(n):
        o.zero_grad()
        m(torch.randn(8, 4)).pow(2).mean().backward()
        o.step()


if __name__ == "__main__":
    train(4)
    p = mp.get_context("fork").Process(target=train, args=(8,))
    p.start()
    p.join()
    print("done", p.exitcode)
