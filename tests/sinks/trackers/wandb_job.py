"""A training script that uses W&B itself and is watched with W&B as a sink. argv: rule file, "watch" or "plain"."""

from __future__ import annotations

import random
import sys

import torch
from torch import nn

import gradwatch

STEPS = 40


def main(rules: str, how: str) -> None:
    import wandb  # here: its test wants to know STEPS without it

    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = wandb.init(project="vision", group="sweep-7", settings=wandb.Settings(console="off"))
    watch = gradwatch.watch(model, optimizer, rules=rules, run_dir="runs") if how == "watch" else None
    for step in range(STEPS):
        x = torch.randn(16, 4) * (1 + random.random())
        loss = model(x).square().mean()
        if step == 25:
            print("weights", *weights(model))
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": loss.item()}, step=step)
    if watch is not None:
        watch.close()
    run.finish()
    print("generators", random.random(), torch.rand(1).item())


def weights(model: nn.Module) -> list[str]:
    """Every weight, bit for bit: from step 25 on they are NaN and tell nothing."""
    return [value.hex() for param in model.parameters() for value in param.double().flatten().tolist()]


if __name__ == "__main__":
    main(*sys.argv[1:])
