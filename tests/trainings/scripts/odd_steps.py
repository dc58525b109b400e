"""Steps taken in every odd way: without gradients, twice, partial backwards, closures without a loss."""

import torch
import torch.nn as nn
from digest import report

torch.manual_seed(0)
n = 0
m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
a = torch.optim.SGD(m.parameters(), 0.01, momentum=0.9)
b = torch.optim.Adam(m[2].parameters(), 1e-3)


def loss_of():
    return m(torch.randn(8, 4)).square().mean()


a.step()
n += 1
for it in range(10):
    a.zero_grad()
    loss_of().backward()
    a.step()
    a.step()
    b.step()
    n += 3
    a.zero_grad()
    a.step()
    n += 1
    loss_of().backward(inputs=[m[0].weight])
    a.step()
    n += 1
    x = loss_of()
    a.zero_grad()
    x.backward()
    a.zero_grad()
    x = loss_of()
    x.backward()
    a.step()
    n += 1
    a.step(lambda: None)
    n += 1

    def c():
        a.zero_grad()
        k = loss_of()
        k.backward()
        return k

    print(it, a.step(c).item())
    n += 1
    for p in m.parameters():
        p.grad = None
    loss_of().backward()
    m[0].weight.grad = None
    a.step()
    n += 1
    m[0].weight.grad = torch.zeros_like(m[0].weight).expand_as(m[0].weight)
    m[2].bias.grad = m[2].bias.grad.clone()
    a.step()
    n += 1

report(n, m)
