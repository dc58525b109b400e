"""MAML: inner steps by autograd.grad(create_graph=True) on functional copies, one outer optimizer."""

import torch
from digest import report
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
meta = torch.optim.Adam(model.parameters(), lr=1e-3)
for it in range(8):
    meta.zero_grad()
    outer = 0.0
    for _ in range(3):
        phase, x = torch.rand(1) * 3, torch.randn(10, 1)
        y = torch.sin(x + phase)
        fast = dict(model.named_parameters())
        for _ in range(2):
            loss = (functional_call(model, fast, x) - y).pow(2).mean()
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {k: v - 0.1 * g for (k, v), g in zip(fast.items(), grads)}
        outer = outer + (functional_call(model, fast, x) - y).pow(2).mean() / 3
    outer.backward()
    meta.step()
    print(it, outer.item())
report(8, model)
