"""bf16 autocast without a scaler, gradient checkpointing, foreach AdamW."""

import torch
from digest import report
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(nn.functional.silu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for n, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=n == 1) if self.training else block(x)
        return self.head(x)


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True)
for step in range(12):
    x = torch.randn(8, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (net(x).float() - 1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
report(12, net)
