"""A Module that wraps the model for one forward, as torchdiffeq's `_PerturbFunc` does."""

import torch
from torch import nn

torch.manual_seed(0)


class Wrap(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.base_func = f

    def forward(self, x):
        return self.base_func(x)


net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for t in range(30):
    w = Wrap(net)
    loss = w(torch.randn(8, 4)).pow(2).mean() * (float("nan") if t == 5 else 1)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("weights", net.weight.data.tolist())
