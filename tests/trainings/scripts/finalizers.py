"""Models, optimizers and what hangs on them: when each of them is freed."""

import copy
import gc
import weakref
import torch
import torch.nn as nn
from digest import report

torch.manual_seed(0)
n = 0


class Big:
    def __init__(self, k):
        self.k = k

    def __del__(self):
        print("big", self.k, "freed")


for k in range(4):
    m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(m.parameters(), 1e-2)
    weakref.finalize(m, print, "model", k, "freed")
    weakref.finalize(opt, print, "optimizer", k, "freed")

    m.big = Big(k)
    for it in range(6):
        opt.zero_grad()
        loss = m(torch.randn(8, 4)).square().mean()
        loss.backward()
        opt.step()
        n += 1
    last = copy.deepcopy(m).requires_grad_(False)
    del last.big
    print("deleting", k)
    del m, opt, loss
    print("deleted", k, gc.collect() >= 0)
report(n, last)
