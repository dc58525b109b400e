"""A user's own helpers, in another file than the model."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(vectors: Tensor) -> Tensor:
    """The Euclidean length of each row."""
    squares = vectors * vectors
    return torch.sqrt(squares.sum(dim=-1))  # FAULT


def rearrange_and_reduce(x: Tensor, keep: Tensor) -> Tensor:
    """Split features in pairs and average the samples kept, in the manner of einops.reduce."""
    pairs = x.reshape(x.shape[0], -1, 2)
    return pairs[keep].mean(dim=0)  # FAULT


def scatter_mean(values: Tensor, index: Tensor, nodes: int) -> Tensor:
    """The mean of the values that arrive at each node of a graph."""
    total = torch.zeros(nodes, values.shape[1]).index_add(0, index, values)
    degree = torch.zeros(nodes).index_add(0, index, torch.ones(len(index)))
    return total / degree[:, None]  # FAULT
