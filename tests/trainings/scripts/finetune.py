"""Fine-tuning: the head alone, then add_param_group with the backbone unfrozen, OneCycleLR, lr by group."""

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
for p in backbone.parameters():
    p.requires_grad_(False)
head = nn.Linear(16, 3)
model = nn.Sequential(backbone, head)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)


def epoch(n, scheduler=None):
    for i in range(n):
        x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        print(i, loss.item(), [g["lr"] for g in optimizer.param_groups])


epoch(6)
for p in backbone.parameters():
    p.requires_grad_(True)
optimizer.add_param_group({"params": backbone.parameters(), "lr": 0.01})
epoch(6, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=8))
report(12, model)
