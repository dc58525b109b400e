"""PCGrad: each task's gradient by itself, conflicts projected away, the sum put into `.grad` by hand."""

import random

import torch
from digest import report
from torch import nn

random.seed(0)
torch.manual_seed(0)
trunk, heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
params = [*trunk.parameters(), *heads.parameters()]
optimizer = torch.optim.Adam(params, lr=1e-2)
for step in range(12):
    x = torch.randn(8, 6)
    features = torch.relu(trunk(x))
    losses = [(heads[0](features) - x[:, :1]).pow(2).mean(), (heads[1](features) + x[:, :1]).pow(2).mean()]
    grads = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
    flat = [torch.cat([g.flatten() for g in each]) for each in grads]
    mixed = [each.clone() for each in flat]
    for each in mixed:
        for other in random.sample(flat, len(flat)):
            dot = torch.dot(each, other)
            if dot < 0:
                each -= dot * other / other.norm() ** 2
    total, at = torch.stack(mixed).sum(0), 0
    for p in params:
        p.grad = total[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    optimizer.step()
    print(step, *[loss.item() for loss in losses])
report(12, trunk, heads)
