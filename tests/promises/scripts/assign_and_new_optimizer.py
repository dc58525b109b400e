"""A checkpoint assigned into the model in the middle of a run, with a new optimizer; a NaN later."""

import torch
from torch import nn

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
o = torch.optim.SGD(m.parameters(), 0.05)
for t in range(20):
    if t == 10:
        m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)
        o = torch.optim.SGD(m.parameters(), 0.05)
    o.zero_grad()
    loss = m(torch.randn(16, 4)).pow(2).mean() * (float("nan") if t == 15 else 1)
    loss.backward()
    o.step()
print("finite", all(bool(p.isfinite().all()) for p in m.parameters()))
