"""The program: reads its arguments, trains, and exec's a configuration as nanoGPT's configurator does."""

import sys

import torch
from digest import report

from trainer.model import Net

lr = 0.1
exec("lr = float(sys.argv[sys.argv.index('--lr') + 1])")
torch.manual_seed(0)
net = Net()
opt = torch.optim.Adagrad(net.parameters(), lr=lr)
for i in range(9):
    opt.zero_grad()
    loss = (net(torch.randn(8, 4)) - 1).abs().mean()
    loss.backward()
    opt.step()
    print(f"{i} {loss.item()}")
print(__name__, __package__, sys.argv[1:])
report(9, net)
