"""Local losses (forward-forward), eligibility traces and evolution strategies: gradients that the script writes itself."""

import torch
import torch.nn as nn
from digest import report

torch.manual_seed(17)
n = 0
# forward-forward: each layer its own optimizer and local loss
layers = [nn.Linear(8, 16), nn.Linear(16, 16)]
opts = [torch.optim.Adam(layer.parameters(), 1e-2) for layer in layers]
for it in range(15):
    pos, neg = torch.randn(8, 8) + 1, torch.randn(8, 8) - 1
    for layer, o in zip(layers, opts):
        hp, hn = layer(pos).relu(), layer(neg).relu()
        loss = (
            nn.functional.softplus(2 - hp.square().mean(1)) + nn.functional.softplus(hn.square().mean(1) - 2)
        ).mean()
        o.zero_grad()
        loss.backward()
        o.step()
        n += 1
        pos, neg = hp.detach(), hn.detach()
    print(it, loss.item())
# eligibility traces: TD(lambda), grads written by hand
v = nn.Linear(4, 1)
o = torch.optim.SGD(v.parameters(), 0.01)
tr = [torch.zeros_like(p) for p in v.parameters()]
for it in range(20):
    s, s2 = torch.randn(1, 4), torch.randn(1, 4)
    val = v(s)
    g = torch.autograd.grad(val.sum(), v.parameters())
    delta = (s.sum() + 0.9 * v(s2) - val).item()
    for t, gg, p in zip(tr, g, v.parameters()):
        t.mul_(0.8).add_(gg)
        p.grad = -delta * t
    o.step()
    n += 1
    print(it, delta)
# evolution strategies through an optimizer
es = nn.Linear(4, 1)
o = torch.optim.Adam(es.parameters(), 1e-2)
x = torch.randn(32, 4)
y = x.sum(1)
with torch.no_grad():
    for it in range(15):
        o.zero_grad()
        base = [p.clone() for p in es.parameters()]
        gs = [torch.zeros_like(p) for p in es.parameters()]
        for k in range(4):
            e = [torch.randn_like(p) for p in es.parameters()]
            for sgn in (1, -1):
                for p, b, d in zip(es.parameters(), base, e):
                    p.copy_(b + sgn * 0.02 * d)
                r = (es(x).squeeze() - y).square().mean()
                for g, d in zip(gs, e):
                    g += sgn * r * d / 0.16
        for p, b, g in zip(es.parameters(), base, gs):
            p.copy_(b)
            p.grad = g
        o.step()
        n += 1
        print(it, r.item())
report(n, *layers, v, es)
