"""As word_language_model does: `torch.save(model)` after training, loaded again at the end."""

import torch
from torch import nn

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.AdamW(m.parameters())
for t in range(5):
    m(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
torch.save(m, "m.pt")
with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
    print("loaded", type(torch.load("m.pt")).__name__)
