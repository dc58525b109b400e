"""Reptile: a copied model and a new optimizer for each task; the outer gradient is set by hand."""

import copy

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
meta = torch.optim.SGD(model.parameters(), lr=0.5)
steps = 0
for it in range(12):
    learner = copy.deepcopy(model)
    inner = torch.optim.SGD(learner.parameters(), lr=0.05)
    phase = torch.rand(1) * 3
    for _ in range(3):
        x = torch.randn(10, 1)
        inner.zero_grad()
        loss = (learner(x) - torch.sin(x + phase)).pow(2).mean()
        loss.backward()
        inner.step()
        steps += 1
    for p, q in zip(model.parameters(), learner.parameters()):
        p.grad = p.detach() - q.detach()
    meta.step()
    steps += 1
    print(it, loss.item())
report(steps, model)
