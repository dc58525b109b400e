"""A warning that Python shows once a place."""

import warnings

import torch

m = torch.nn.Linear(2, 1)
o = torch.optim.SGD(m.parameters(), 0.1)
for t in range(3):
    warnings.warn("once, please")
    m(torch.ones(4, 2)).sum().backward()
    o.step()
    o.zero_grad()
