"""PyTorch's tutorial on optimizer steps fused into the backward: one optimizer a parameter, stepped by its hook."""

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}
steps = 0


def optimizer_hook(parameter):
    global steps
    steps += 1
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(optimizer_hook)
for step in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 2, (8,)))
    loss.backward()
    print(step, loss.item())
report(steps, model)
