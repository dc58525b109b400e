"""An optimizer copied, pickled, loaded, patched, hooked, of another class than it was, with fewer parameters."""

import copy
import io
import pickle
import torch
import torch.nn as nn
from digest import report

torch.manual_seed(21)
n = 0
m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(m.parameters(), 1e-2)


def go(o, k=6, mm=None):
    global n
    mm = mm or m
    for it in range(k):
        x = torch.randn(8, 4)
        loss = (mm(x).squeeze() - x.sum(1)).square().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        n += 1
        print(n, loss.item())


go(opt)
m, opt = copy.deepcopy((m, opt))
go(opt)
m, opt = pickle.loads(pickle.dumps((m, opt)))
go(opt)
b = io.BytesIO()
torch.save((m, opt), b)
b.seek(0)
m, opt = torch.load(b, weights_only=False)
go(opt)
orig = opt.step
calls = []


def patched(*a, **k):
    calls.append(1)
    return orig(*a, **k)


opt.step = patched
go(opt)
print(len(calls))
del opt.step
opt.register_step_pre_hook(lambda o, a, k: calls.append(2))
opt.register_step_post_hook(lambda o, a, k: calls.append(3))
go(opt, 3)
print(calls)
opt.__class__ = torch.optim.AdamW
go(opt, 3)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        r = super().step(closure)
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]:
                    p.add_(torch.randn_like(p) * 1e-4)
        return r


go(Noisy(m.parameters(), 0.01))
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
for k in range(4):
    go(opt, 2)
    sched.step(1.0)
    print(opt.param_groups[0]["lr"])
opt.param_groups[0]["params"] = list(m.parameters())[:2]
go(opt, 3)
print(repr(opt), len(opt.state), list(m[0]._forward_hooks), m[0].weight._backward_hooks)
go(torch.optim.SGD(m.parameters(), 0.01, foreach=False, nesterov=True, momentum=0.9))
go(torch.optim.Adam(m.parameters(), 0.01, fused=True))
go(torch.optim.ASGD(m.parameters(), maximize=False))
report(n, m)
