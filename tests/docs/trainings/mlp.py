"""An MLP on noisy labels: SGD with momentum, the gradients clipped, a cosine schedule. It is well."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
criterion = nn.CrossEntropyLoss()
truth = torch.randn(16, 4)
for step in range(300):
    x = torch.randn(64, 16)
    y = (x @ truth + torch.randn(64, 4)).argmax(1)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.3f}")
