"""torch.optim.swa_utils: SWALR after half of the training, then update_bn."""

import torch
from digest import report
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

torch.manual_seed(0)
loader = [(torch.randn(8, 6), torch.randint(0, 2, (8,))) for _ in range(4)]
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swa_model, scheduler = AveragedModel(model), CosineAnnealingLR(optimizer, T_max=100)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
for epoch in range(6):
    for input, target in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(input), target).backward()
        optimizer.step()
    if epoch > 3:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(epoch, optimizer.param_groups[0]["lr"])
update_bn(loader, swa_model)
report(24, model, swa_model)
