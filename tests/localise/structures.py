"""Faults that hang on how a model is built: nested, shared, masked, checkpointed, custom, recurrent."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.localise.models import Faulty


class Scale(nn.Module):
    """A block of a model: 1 over a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(6))

    def forward(self, h: Tensor) -> Tensor:
        return h / self.scale  # fault


class NestedModule(Faulty):
    """The fault is two modules deep."""

    at = "blocks.1.0"
    ops = ("div",)
    phase = "backward"  # tanh makes 1 of the infinity
    faulty = Scale

    def build(self) -> None:
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6)), nn.Sequential(Scale(), nn.Tanh())])

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class SharedModule(Faulty):
    """One module called twice: the second call is at fault."""

    at = "root"
    ops = ("sqrt",)
    phase = "forward"

    class Root(nn.Module):
        """sqrt."""

        def forward(self, h: Tensor) -> Tensor:
            return torch.sqrt(h)  # fault

    faulty = Root

    def build(self) -> None:
        self.root = self.Root()

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return self.root(self.root(h.abs() + 1) - 3)


class Attention(nn.Module):
    """Attention of one head, its keys masked."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, h: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(6)
        scores = scores.masked_fill(~keep, float("-inf"))
        weights = torch.softmax(scores, dim=-1)  # fault
        return weights @ v


class EmptyAttention(Faulty):
    """A sequence of padding only: every key is masked."""

    at = "attention"
    ops = ("softmax",)
    phase = "forward"
    faulty = Attention

    def build(self) -> None:
        self.attention = Attention()

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        keep = torch.ones(len(h), len(h), dtype=torch.bool)
        keep[2] = False
        return self.attention(h, keep)


class CheckpointedFault(Faulty):
    """The same fault as SqrtAtZero, in a checkpointed segment (non-reentrant)."""

    ops = ("sqrt",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        def segment(y: Tensor) -> Tensor:
            return y + torch.sqrt(y - y)  # fault

        return checkpoint(segment, h, use_reentrant=False)


class ReentrantCheckpoint(Faulty):
    """The same in a reentrant checkpoint, whose backward runs another one."""

    ops = ("sqrt",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        def segment(y: Tensor) -> Tensor:
            return y + torch.sqrt(y - y)  # fault

        return checkpoint(segment, h, use_reentrant=True)


class Halved(torch.autograd.Function):
    """A custom Function whose backward divides by what it kept."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return grad / (h - h)  # fault


class CustomBackward(Faulty):
    """The backward of a custom Function is at fault, not its forward."""

    ops = ("div",)
    faulty = Halved

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        return Halved.apply(h)


class LstmExploded(Faulty):
    """An infinite hidden state handed to an LSTM by hand-made scaling."""

    ops = ("mul",)
    phase = "forward"

    def build(self) -> None:
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        scaled = h * 1e30 * 1e30  # fault
        out, _ = self.lstm(scaled.unsqueeze(1))
        return out.squeeze(1) + scaled


class DropoutBefore(Faulty):
    """Whether it fails hangs on what dropout drew: the replay must draw the same."""

    ops = ("log",)
    phase = "forward"

    def build(self) -> None:
        self.dropout = nn.Dropout(0.5)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        kept = self.dropout(torch.ones_like(h))
        return h + torch.log(kept)  # fault


class BatchNormOfConstant(Faulty):
    """A home-made batch normalisation of a column that does not vary."""

    ops = ("div",)
    phase = "forward"

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        flat = h * 0 + 1
        return (flat - flat.mean(0)) / flat.std(0)  # fault


class BackwardOverflow(Faulty):
    """The forward is fine; two large factors make the gradient overflow."""

    ops = ("mul",)

    def wrong(self, h: Tensor, x: Tensor) -> Tensor:
        small = h * 1e-30
        large = small * 1e30
        tiny = large * 1e-38
        return tiny * 1e38 * 1e38 * 1e-38 + self.steep(h)

    def steep(self, h: Tensor) -> Tensor:
        shrunk = h * 1e20  # fault
        return torch.tanh((shrunk - shrunk.detach()) * 1e20)
