"""A checkpoint saved whole and by state_dict, resumed twice: into a new model, and assigned with a new optimizer."""

import torch
from digest import report
from torch import nn

torch.manual_seed(0)


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model, optimizer, n):
    for _ in range(n):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())


model = make()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
train(model, optimizer, 5)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, "ckpt.pt")
torch.save(model, "whole.pt")
checkpoint = torch.load("ckpt.pt")
resumed = make()
resumed.load_state_dict(checkpoint["model"])
optimizer = torch.optim.Adam(resumed.parameters(), lr=1e-2)
optimizer.load_state_dict(checkpoint["optimizer"])
train(resumed, optimizer, 5)
resumed.load_state_dict({k: v.clone() for k, v in torch.load("ckpt.pt")["model"].items()}, assign=True)
optimizer = torch.optim.Adam(resumed.parameters(), lr=1e-2)
train(resumed, optimizer, 5)
whole = torch.load("whole.pt", weights_only=False)
optimizer = torch.optim.Adam(whole.parameters(), lr=1e-2)
train(whole, optimizer, 5)
report(20, model, resumed, whole)
