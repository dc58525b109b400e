"""Its model, in a module of its own."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([nn.Linear(4, 4).weight for _ in range(2)])
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for w in self.layers:
            x = (x @ w).relu()
        return self.out(x)
