"""Data without a download: digits of scikit-learn, sources of the standard library, generated graphs and numbers.

N rows, T tokens.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1,797 images [N, 1, 8, 8] of mean 0 and deviation 1, and their classes."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    return ((images - images.mean()) / images.std())[order], torch.tensor(classes)[order]


def draw_digits(random: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of `digits`, moved by up to a pixel, so that few batches are alike."""
    images, classes = digits()
    chosen = torch.randint(len(images), (rows,), generator=random)
    shift = torch.randint(-1, 2, (2,), generator=random).tolist()
    return torch.roll(images[chosen], shift, (2, 3)), classes[chosen]


def _sources() -> str:
    import argparse
    import heapq
    import json.decoder
    import textwrap

    modules: tuple[ModuleType, ...] = (argparse, heapq, json.decoder, textwrap)
    return "".join(inspect.getsource(module) for module in modules)


def _numbered(tokens: list[str]) -> tuple[Tensor, int]:
    number = {token: index for index, token in enumerate(sorted(set(tokens)))}
    return torch.tensor([number[token] for token in tokens]), len(number)


@cache
def characters() -> tuple[Tensor, int]:
    """Modules of the standard library as characters, and how many kinds there are."""
    return _numbered(list(_sources()))


@cache
def words() -> tuple[Tensor, int]:
    """The same as words and signs; a word that is rare is one and the same token."""
    found = re.findall(r"\w+|[^\w\s]|\n", _sources())
    often = {word for word in set(found) if found.count(word) > 3}
    return _numbered([word if word in often else "<unk>" for word in found])


def draw_text(random: torch.Generator, ids: Tensor, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs [N, T] from somewhere in a text, and the tokens that follow."""
    starts = torch.randint(len(ids) - tokens - 1, (rows,), generator=random)
    chunks = ids[starts[:, None] + torch.arange(tokens + 1)]
    return chunks[:, :-1], chunks[:, 1:]


def draw_clusters(random: torch.Generator, rows: int, spread: float) -> tuple[Tensor, Tensor]:
    """Points [N, 32] around ten centres, and which."""
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))
    classes = torch.randint(10, (rows,), generator=random)
    return centres[classes] + spread * torch.randn(rows, 32, generator=random), classes


def draw_regression(random: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Friedman's first function: ten features [N, 10], of which five matter, and its value [N, 1]."""
    x = torch.rand(rows, 10, generator=random)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, (y + torch.randn(rows, generator=random)).unsqueeze(1) / 5


@cache
def graph() -> tuple[Tensor, Tensor, Tensor]:
    """A stochastic block model of 120 nodes: normalised adjacency, features [120, 16], and blocks of three."""
    random = torch.Generator().manual_seed(3)
    blocks = torch.arange(120) % 3
    chance = torch.where(blocks[:, None] == blocks[None], 0.12, 0.02)
    edges = (torch.rand(120, 120, generator=random) < chance).float().triu(1)
    linked = edges + edges.T + torch.eye(120)
    root = linked.sum(1).rsqrt()
    features = torch.randn(3, 16, generator=random)[blocks] + 3 * torch.randn(120, 16, generator=random)
    return root[:, None] * linked * root[None], features, blocks
