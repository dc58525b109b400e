"""Compiles models and steps in several ways; prints every warning of Python's as JSON; torch logs to stderr.

`--watch` attaches by `gradwatch.watch`, with its defaults.
"""

import json
import sys
import warnings

import torch
from torch import nn

said: set[str] = set()


class Net(nn.Module):
    """With a block that writes in place, and one that is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four numbers a row."""
        h = torch.utils.checkpoint.checkpoint(self.enter, x, use_reentrant=False)
        h = torch.relu_(self.norm(h))
        return self.leave(h)


def train(form: str, backend: str) -> None:
    """A few steps at two batch sizes, evaluated in between."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gw = None
    if "--watch" in sys.argv:
        import gradwatch

        gw = gradwatch.watch(model, optimizer)
    forward = model
    if form == "model":
        forward = torch.compile(model, backend=backend, fullgraph=True)
    elif form == "in place":
        model.compile(backend=backend)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        forward(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    if form == "step":
        step = torch.compile(step, backend=backend)
    for number in range(6):
        step(torch.randn(4 if number < 3 else 6, 8))
        if form != "step" and number == 3:
            model.eval()
            with torch.no_grad():
                forward(torch.randn(5, 8))
            model.train()
    if gw is not None:
        gw.close()


if __name__ == "__main__":
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, category, *where: said.add(f"{category.__name__}: {message}")
    for form, backend in (("model", "aot_eager"), ("in place", "eager"), ("step", "aot_eager")):
        train(form, backend)
    print(json.dumps(sorted(said)))
