"""Parameters swapped, converted, assigned, shared, frozen and removed in the middle of a training."""

import torch
import torch.nn as nn
from digest import report

torch.manual_seed(22)
n = 0
m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def go(o, k=6, dt=torch.float32):
    global n
    for it in range(k):
        x = torch.randn(8, 4, dtype=dt)
        loss = (m(x).squeeze() - x.sum(1)).square().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        n += 1
        print(n, loss.item())


opt = torch.optim.SGD(m.parameters(), 0.02)
go(opt)
torch.utils.swap_tensors(m[0].weight, nn.Parameter(torch.randn(8, 4) * 0.3))
opt.zero_grad()
go(opt)
torch.__future__.set_swap_module_params_on_conversion(True)
m.double()
go(opt, dt=torch.float64)
torch.__future__.set_swap_module_params_on_conversion(False)
torch.__future__.set_overwrite_module_params_on_conversion(True)
m.float()
opt = torch.optim.SGD(m.parameters(), 0.02)
go(opt)
torch.__future__.set_overwrite_module_params_on_conversion(False)
m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)
opt = torch.optim.SGD(m.parameters(), 0.02)
go(opt)
m[0].weight.data = m[0].weight.data.clone()
go(opt, 3)
m[0].bias = None
go(opt, 3)
setattr(m[2], "weight", nn.Parameter(m[2].weight.detach() * 0.5))
opt.param_groups[0]["params"] = list(m.parameters())
go(opt)
m.share_memory()
go(opt, 3)
m.requires_grad_(False)
m[2].requires_grad_(True)
go(opt, 3)
report(n, m)
