"""`model = torch.compile(model)`, trained, evaluated, and trained on at another batch size."""

import torch
from digest import report
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(4 if step < 8 else 6, 8)
    loss = (compiled(x) - x.mean(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item())
compiled.eval()
with torch.no_grad():
    print("eval", compiled(torch.ones(2, 8)).sum().item())
report(12, model)
