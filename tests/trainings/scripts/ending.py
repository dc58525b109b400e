"""A training that ends by an exception, by sys.exit, or by Ctrl-C in the middle of an epoch."""

import os
import signal
import sys

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 1))
opt = torch.optim.NAdam(net.parameters(), lr=1e-2)
for i in range(8):
    opt.zero_grad()
    loss = (net(torch.randn(8, 4)) - 1).pow(2).mean()
    loss.backward()
    opt.step()
    print(i, loss.item())
report(8, net)
if sys.argv[1] == "exception":
    raise RuntimeError("the disk is full")
if sys.argv[1] == "exit":
    sys.exit(3)
os.kill(os.getpid(), signal.SIGINT)
for _ in range(10**9):
    pass
