"""Gradients accumulated over four micro-batches, a clip, and a last window of two."""

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = [(torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(22)]
steps, total = 0, 0.0
for i, (x, y) in enumerate(batches):
    loss = nn.functional.cross_entropy(model(x), y) / 4
    loss.backward()
    total += loss.item()
    if (i + 1) % 4 == 0 or i + 1 == len(batches):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        print(f"step {steps} loss {total:.6f} norm {norm:.6f}")
        total = 0.0
report(steps, model)
