"""A sweep: is the weight of a deleted model freed while another watched model lives?"""

import weakref

import torch


def train(m, o, d):
    for _ in range(3):
        o.zero_grad()
        m(torch.randn(16, d)).square().mean().backward()
        o.step()
    o.zero_grad()


small = torch.nn.Linear(8, 1)
so = torch.optim.SGD(small.parameters(), lr=0.05)
train(small, so, 8)
for trial in range(3):
    big = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024))
    o = torch.optim.SGD(big.parameters(), lr=0.01)
    train(big, o, 1024)
    weight = weakref.ref(big[0].weight)
    del big, o
    print("trial", trial, "freed", weight() is None)
    train(small, so, 8)
