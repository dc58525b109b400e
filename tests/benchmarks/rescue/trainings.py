"""Three small trainings that converge in seconds: what is lost by a fault, or by a guard, shows in their loss.

Nothing is downloaded: the digits come with scikit-learn, the text is the source of the standard library. Every
batch is drawn from a generator of its own, seeded by run and step, so neither a fault nor a guard changes the
data of later steps. N batch rows, T tokens, C classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

CONTEXT = 32  # tokens


@dataclass(frozen=True)
class Batch:
    """Inputs (float features [N, 64], or token ids [N, T]) and the class of each row or token."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Training:
    """One way to train: `rate(step)` is its learning rate, `body` the module that turns inputs into features.

    `held_out` rows are never trained on; the loss on them, with the last weights, is what a run is judged by.
    """

    name: str
    title: str
    steps: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    rate: Callable[[float], float]
    draw: Callable[[torch.Generator, bool], Batch]

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of one step."""
        return self.draw(torch.Generator().manual_seed(seed * 1_000_003 + step), False)

    def held_out(self) -> Batch:
        """The rows a run is judged by, the same for every seed."""
        return self.draw(torch.Generator().manual_seed(0), True)

    def learning_rate(self, step: int) -> float:
        """Of one step."""
        return self.rate(step / self.steps)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, nats."""
    logits = model(batch.inputs)
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


# -- digits -------------------------------------------------------------------------------------------------


@cache
def _digits() -> tuple[Tensor, Tensor]:
    package = find_spec("sklearn")  # what its `load_digits` reads; its import takes two seconds
    assert package is not None
    assert package.origin is not None
    table = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    pixels, classes = table[:, :-1], table[:, -1].astype(int)
    inputs = torch.tensor(pixels, dtype=torch.float32) / 8 - 1
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    return inputs[order], torch.tensor(classes)[order]


def _draw_digits(chance: torch.Generator, held_out: bool) -> Batch:
    inputs, classes = _digits()
    cut = 1_300
    if held_out:
        # Noise on both sides keeps the loss away from zero, where a ratio of losses would say nothing.
        clean, targets = inputs[cut:], classes[cut:]
        return Batch(clean + torch.randn(clean.shape, generator=chance), targets)
    rows = torch.randint(0, cut, (64,), generator=chance)
    return Batch(inputs[rows] + torch.randn(64, inputs.shape[1], generator=chance), classes[rows])


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for width in (64, 96, 96, 96):
        layers += [nn.Linear(width, 96), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(96, 10))


# -- text ---------------------------------------------------------------------------------------------------


@cache
def _text() -> tuple[Tensor, int]:
    """Token ids of some modules of the standard library, character by character, and how many kinds there are."""
    import argparse
    import heapq
    import json.decoder
    import textwrap

    modules = (argparse, heapq, json.decoder, textwrap)
    text = "".join(inspect.getsource(module) for module in modules)
    kinds = sorted(set(text))
    number = {kind: index for index, kind in enumerate(kinds)}
    return torch.tensor([number[kind] for kind in text]), len(kinds)


def _draw_text(chance: torch.Generator, held_out: bool) -> Batch:
    ids, _ = _text()
    cut = len(ids) * 9 // 10
    rows, first, last = (64, cut, len(ids)) if held_out else (16, 0, cut)
    starts = torch.randint(first, last - CONTEXT - 1, (rows,), generator=chance)
    chunks = ids[starts[:, None] + torch.arange(CONTEXT + 1)]
    return Batch(chunks[:, :-1], chunks[:, 1:])


class CharLSTM(nn.Module):
    """Embedding, one LSTM layer, head."""

    def __init__(self, kinds: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, kinds)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        logits: Tensor = self.head(hidden)
        return logits


class Block(nn.Module):
    """Pre-norm causal self-attention and MLP, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A character-level GPT of two blocks."""

    def __init__(self, kinds: int, width: int = 48, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, kinds)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def _warm_cosine(rate: float, warm: float = 0.1, least: float = 0.05) -> Callable[[float], float]:
    """Linear warm-up, then a cosine down to `least` of the peak, so that runs end in comparable places."""

    def at(done: float) -> float:
        if done < warm:
            return rate * (done + 0.01) / warm
        return rate * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm))))

    return at


TRAININGS = {
    training.name: training
    for training in (
        Training(
            "mlp",
            "MLP (digits, SGD)",
            600,
            _mlp,
            lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
            _warm_cosine(0.05),
            _draw_digits,
        ),
        Training(
            "lstm",
            "LSTM (text, Adam)",
            600,
            lambda: CharLSTM(_text()[1]),
            lambda model: Adam(model.parameters(), lr=4e-3),
            _warm_cosine(4e-3),
            _draw_text,
        ),
        Training(
            "gpt",
            "GPT (text, AdamW)",
            600,
            lambda: GPT(_text()[1]),
            lambda model: AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
            _warm_cosine(3e-3),
            _draw_text,
        ),
    )
}
