"""A GradScaler rejects every step from the first on: torch never calls optimizer.step."""

import torch
from torch import nn

torch.manual_seed(0)
m = nn.Linear(4, 1)
o = torch.optim.SGD(m.parameters(), 0.01)
s = torch.amp.GradScaler("cpu")
for t in range(300):
    o.zero_grad()
    x = torch.randn(8, 4)
    x[0] = float("inf")
    with torch.autocast("cpu", torch.float16):
        loss = m(x).float().pow(2).mean()
    s.scale(loss).backward()
    s.step(o)
    s.update()
print("scale", s.get_scale())
