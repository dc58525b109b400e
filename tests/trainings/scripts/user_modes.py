"""Dispatch, function and FLOP-counting modes of the script's own, and torch's profiler, around whole steps."""

import torch
import torch.nn as nn
from collections import Counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from digest import report

torch.manual_seed(0)
n = 0


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.c = Counter()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.c[str(f)] += 1
        return f(*args, **(kwargs or {}))


class FLog(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.c = Counter()

    def __torch_function__(self, f, types, args=(), kwargs=None):
        self.c[getattr(f, "__name__", str(f))] += 1
        return f(*args, **(kwargs or {}))


m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.AdamW(m.parameters(), 1e-2, foreach=False)


def go():
    global n
    opt.zero_grad()
    loss = m(torch.randn(8, 4)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    opt.step()
    n += 1


for it in range(12):
    with Log() as a:
        go()
    with FLog() as b:
        go()
    with FlopCounterMode(display=False) as f:
        go()
    print(it, sorted(a.c.items()), sorted(b.c.items()), f.get_total_flops())
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
    go()
print(
    sorted((e.key, e.count) for e in p.key_averages() if e.key.startswith(("Optimizer", "autograd::engine")))
)
report(n, m)
