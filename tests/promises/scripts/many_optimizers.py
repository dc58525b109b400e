"""Reptile: 200 times a copied model and a new optimizer, three steps each; how often was the heap listed?"""

import copy
import gc

import torch

listed = 0
get_objects = gc.get_objects


def counting(*args, **kwargs):
    global listed
    listed += 1
    return get_objects(*args, **kwargs)


gc.get_objects = counting
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
meta = torch.optim.SGD(m.parameters(), lr=0.1)
for _ in range(200):
    m2 = copy.deepcopy(m)
    o = torch.optim.SGD(m2.parameters(), lr=0.05)
    for _ in range(3):
        o.zero_grad()
        m2(torch.randn(16, 8)).square().mean().backward()
        o.step()
    for p, q in zip(m.parameters(), m2.parameters(), strict=True):
        p.grad = p.detach() - q.detach()
    meta.step()
print("weights", [float(p.sum()) for p in m.parameters()])
print("heap listed", listed, "times")
