"""Training loops whose gradients differ in the ways that decide a monitor's cost.

Few large tensors (mlp), convolutions and small norms (resnet), a transformer with tied weights and a fused
optimizer (gpt), 2,000 tensors of 16 to 256 elements (tiny), one tensor of 16 million (embedding); and the first
with gradients accumulated over four micro-batches (accumulating).
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]

BATCHES = 8
"""A loop cycles through so many batches. Labels are random: the loss stays away from 0, gradients alike."""


@dataclass(eq=False)
class Task:
    """A model, its optimizer and its data: one ordinary training loop, ready to run."""

    model: nn.Module
    optimizer: Optimizer
    batches: tuple[Batch, ...]
    micros: int = 1  # backwards of a step

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._next: Iterator[Batch] = itertools.cycle(self.batches)

    def forward(self) -> Tensor:
        """The loss of the next batch, a scalar with a graph."""
        x, y = next(self._next)
        return functional.cross_entropy(self.model(x), y)

    def gradients(self) -> list[Tensor]:
        """The gradients as the optimizer would find them now."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def step(self) -> None:
        """One training step with nobody watching."""
        for _ in range(self.micros):
            self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Workload:
    """How to build one kind of task.

    `large`: its gradients are large tensors, so memory bandwidth decides. A batch has `rows` rows, or `few`
    where only the gradients matter; a step takes `micros` of them.
    """

    name: str
    title: str
    large: bool
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: Callable[[int], Batch]
    rows: int
    few: int
    micros: int = 1

    @functools.cached_property
    def parameters(self) -> int:
        """How many parameters its model has."""
        with torch.device("meta"):
            return sum(1 for _ in self.model().parameters())

    def task(self) -> Task:
        """A task with seeded weights and data, one step old, so that the optimizer's state exists."""
        torch.manual_seed(0)
        model = self.model()
        batches = tuple(self.batch(self.rows) for _ in range(BATCHES))
        task = Task(model, self.optimizer(model.parameters()), batches, self.micros)
        task.step()
        return task

    def twin(self, task: Task) -> Task:
        """Another task over the very same memory: own modules and Parameters, shared storage of weights,
        buffers and optimizer state.

        Hooks belong to Parameter and Module objects, so twins are watched independently of each other; and as
        no twin has memory of its own, none can be faster for where its memory happens to lie.
        """
        model = copy.deepcopy(task.model)
        for mine, theirs in zip(
            itertools.chain(model.parameters(), model.buffers()),
            itertools.chain(task.model.parameters(), task.model.buffers()),
            strict=True,
        ):
            mine.data = theirs.data
        twin = Task(model, self.optimizer(model.parameters()), task.batches, task.micros)
        for mine, theirs in zip(model.parameters(), task.model.parameters(), strict=True):
            twin.optimizer.state[mine] = dict(task.optimizer.state[theirs])
        return twin

    def carrier(self, task: Task) -> Task:
        """A twin with small batches: the same gradients' sizes for less time."""
        carrier = self.twin(task)
        batches = tuple(self.batch(self.few) for _ in range(BATCHES))
        return Task(carrier.model, carrier.optimizer, batches, carrier.micros)


def _wide_mlp(width: int = 2048) -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 100),
    )


class _Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al. 2016, the basic block)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def _resnet(width: int = 48) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    inputs = width
    for stage in range(4):
        for block in range(2):
            outputs = width << stage
            layers.append(_Residual(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = x + self.out(functional.gelu(self.fc(self.norm2(x))))
        return mixed


class GPT(nn.Module):
    """A decoder of 12.3 million parameters with tied input and output embeddings (Radford et al. 2019)."""

    def __init__(
        self, vocabulary: int = 4096, width: int = 384, layers: int = 6, heads: int = 6, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[_TransformerBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.flatten(0, 1)


class _TinyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.linear(self.norm(x)))


def _tiny(layers: int = 500, width: int = 16) -> nn.Module:
    return nn.Sequential(*[_TinyBlock(width) for _ in range(layers)], nn.Linear(width, 4))


class _BagOfWords(nn.Module):
    def __init__(self, vocabulary: int = 250_000, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, 256)
        self.out = nn.Linear(256, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(functional.relu(self.hidden(self.embedding(tokens).mean(1))))
        return logits


# Small learning rates: every contender moves the same weights, and gradients should look alike throughout.
def _momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _fused_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-7, fused=True)


def _vectors(width: int, classes: int) -> Callable[[int], Batch]:
    return lambda rows: (torch.randn(rows, width), torch.randint(0, classes, (rows,)))


def _images(rows: int) -> Batch:
    return torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))


def _text(rows: int) -> Batch:
    return torch.randint(0, 4096, (rows, 128)), torch.randint(0, 4096, (rows * 128,))


def _bags(rows: int) -> Batch:
    return torch.randint(0, 250_000, (rows, 32)), torch.randint(0, 2, (rows,))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mlp", "wide MLP", True, _wide_mlp, _momentum, _vectors(1024, 100), 64, 4),
        Workload("resnet", "ResNet", True, _resnet, _momentum, _images, 8, 1),
        Workload("gpt", "GPT 12M", True, GPT, _fused_adamw, _text, 2, 1),
        Workload("tiny", "2,000 tiny", False, _tiny, _sgd, _vectors(16, 4), 16, 16),
        Workload("embedding", "embedding", True, _BagOfWords, _sgd, _bags, 256, 32),
        Workload(
            "accumulating",
            "wide MLP, 4 micro-batches",
            True,
            _wide_mlp,
            _momentum,
            _vectors(1024, 100),
            64,
            4,
            4,
        ),
    )
}
