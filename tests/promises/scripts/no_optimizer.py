"""As word_language_model does: no optimizer object, SGD by hand with a clip; gradients are NaN from step 3 on."""

import torch

torch.manual_seed(0)
m = torch.nn.Linear(4, 1)
for t in range(10):
    x = torch.randn(8, 4)
    loss = (m(x) ** 2).mean() if t < 3 else torch.sqrt((m(x) * 0).sum()) * 0 + m(x).mean() * float("nan")
    m.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.25)
    for p in m.parameters():
        p.data.add_(p.grad, alpha=-0.1)
print("weights", m.weight.data.tolist())
