"""An exponential moving average of the weights, and a second one by deepcopy as timm writes it."""

import copy

import torch
from digest import report
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
mine = copy.deepcopy(model).eval()
for step in range(12):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
    with torch.no_grad():
        for a, b in zip(mine.state_dict().values(), model.state_dict().values()):
            a.copy_(a * 0.9 + b * 0.1 if a.is_floating_point() else b)
    if step == 6:
        mine = copy.deepcopy(ema.module)
    print(step, loss.item(), mine(x).sum().item())
report(12, model, ema, mine)
