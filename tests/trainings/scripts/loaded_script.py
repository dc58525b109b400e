"""A model that was compiled by TorchScript, saved, loaded elsewhere and trained further."""

import io

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
saved = io.BytesIO()
torch.jit.save(torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))), saved)
saved.seek(0)
model = torch.jit.load(saved)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print("step", step, "loss", loss.item())
report(8, model)
