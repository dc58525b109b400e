"""Small models that several trainings share. N rows, T tokens, C channels."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


class CNN(nn.Module):
    """Two convolutions, dropout, two linear layers: the MNIST example of PyTorch, smaller."""

    def __init__(self, classes: int = 10, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(256, 64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout(functional.max_pool2d(x, 2)).flatten(1)
        out: Tensor = self.fc2(self.dropout(functional.relu(self.fc1(x))))
        return out


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, and the input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """A stem, residual blocks, a linear head."""

    def __init__(self, blocks: int = 2, channels: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 2).flatten(1))
        return out


class Attention(nn.Module):
    """Multi-head self-attention, with keys and values of `memory` where that is given."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.kv, self.o = (nn.Linear(width, n * width) for n in (1, 2, 1))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (self._split(part) for part in (self.q(x), *self.kv(source).chunk(2, -1)))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention and MLP; `mlp` may be another module of the same shape."""

    def __init__(
        self, width: int, heads: int = 4, causal: bool = True, feed: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = feed or mlp(width, 4 * width, width, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A language model of `depth` blocks; not causal, it fills gaps."""

    def __init__(
        self, kinds: int, width: int = 32, depth: int = 2, context: int = 32, causal: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, causal=causal) for _ in range(depth)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, kinds)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        out: Tensor = self.head(self.ln_f(self.blocks(x)))
        return out


class Recurrent(nn.Module):
    """Embedding, LSTM, head."""

    def __init__(self, kinds: int, width: int = 48, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(kinds, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, kinds)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(ids)))
        out: Tensor = self.head(self.dropout(hidden))
        return out


class MixtureOfExperts(nn.Module):
    """Every token goes to one of several MLPs."""

    def __init__(self, width: int, experts: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(mlp(width, 2 * width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            if here.any():
                out = out.index_put((here,), expert(x[here]) * weight[here].unsqueeze(-1))
        return out


class LowRank(nn.Module):
    """A linear layer that is kept as it is, and a product of two small matrices added to it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * self.lora_b(self.lora_a(x))
        return out
