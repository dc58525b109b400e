"""Training jobs that must not notice that a step of theirs was run again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Job(nn.Module):
    """Dropout, batch normalisation, every generator, a count of its own calls; `kind` varies the rest."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.seen: list[int] = []
        self.enter = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.leave = nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(8))

    def body(self, h: Tensor) -> Tensor:
        """What a checkpoint may run again."""
        h = self.dropout(torch.relu(self.norm(h)))
        return self.lstm(h.unsqueeze(1))[0].squeeze(1)

    def forward(self, x: Tensor) -> Any:
        """Every way in which a forward may leave something behind."""
        self.calls += 1
        self.seen.append(self.calls)
        h = self.enter(x) * (1 + 0.01 * random.random()) + float(np.random.rand())
        if self.kind.startswith("checkpoint"):
            h = checkpoint(self.body, h, use_reentrant=self.kind == "checkpoint-reentrant")
        else:
            h = self.body(h)
        with torch.no_grad():
            self.centre.lerp_(h.detach().float().mean(0), 0.1)
        out = self.leave(h - self.centre)
        return {"logits": out, "again": (out * 2,)} if self.kind == "dict" else out


def logits(out: Any) -> Tensor:
    """The tensor that the loss is made of."""
    return out["logits"] + out["again"][0] if isinstance(out, dict) else out


KINDS = ("plain", "autocast", "checkpoint", "checkpoint-reentrant", "accumulate", "dict")


def train(kind: str, at_step: Callable[[Job, int], None], steps: int = 6) -> tuple[Job, list[float], Any]:
    """Train one job; `at_step(model, step)` is called just before each step. Model, losses, generators after."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = Job(kind)
    at_step(model, -1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(steps):
        for _ in range(2 if kind == "accumulate" else 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
                loss = nn.functional.cross_entropy(
                    logits(model(torch.randn(6, 4))).float(), torch.arange(6) % 3
                )
            loss.backward()
            losses.append(float(loss))
        at_step(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
