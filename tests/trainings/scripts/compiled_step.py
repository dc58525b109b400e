"""PyTorch's tutorial on compiling the optimizer: forward and backward eager, `step` inside torch.compile."""

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8, False) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)


@torch.compile(backend="eager", fullgraph=False)
def fn():
    optimizer.step()
    scheduler.step()


for step in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    fn()
    print(step, loss.item())
report(10, model)
