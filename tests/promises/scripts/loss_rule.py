"""SGD whose learning rate is too small to matter: the loss stays near 900, and the loop never calls observe."""

import torch

m = torch.nn.Linear(8, 1)
o = torch.optim.SGD(m.parameters(), 1e-6)
for t in range(60):
    loss = ((m(torch.randn(16, 8)) + 30) ** 2).mean()
    o.zero_grad()
    loss.backward()
    o.step()
print("loss", loss.item())
