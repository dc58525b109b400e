"""Trainings on sequences: unaligned labels, tied embeddings, long memories. N rows, T tokens, C channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW, RMSprop

from tests.benchmarks.detection.data import draw_text, words
from tests.benchmarks.detection.schedules import warm_cosine
from tests.benchmarks.detection.training import Batch, Training, single

STEPS = 1000


class Tagger(nn.Module):
    """A bidirectional LSTM with a class for every frame."""

    def __init__(self, features: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0]).log_softmax(-1)
        return out


def ctc(seed: int) -> Training:
    """Connectionist temporal classification: symbols of two or three noisy frames each, without their places."""
    random = torch.Generator().manual_seed(seed)
    shapes = torch.randn(6, 8, generator=torch.Generator().manual_seed(5))
    model = Tagger(8, 7)

    def batch(step: int) -> Batch:
        symbols = torch.randint(6, (16, 6), generator=random)
        frames = shapes[symbols].repeat_interleave(3, 1)
        return frames + 0.7 * torch.randn(frames.shape, generator=random), symbols + 1

    def loss(batch: Batch) -> Tensor:
        frames, symbols = batch
        scores = model(frames).transpose(0, 1)
        lengths = (torch.full((16,), n) for n in (18, 6))
        return functional.ctc_loss(scores, symbols, *lengths)

    return single(model, Adam(model.parameters(), lr=3e-3), loss, batch)


class Tied(nn.Module):
    """A GRU whose head is its embedding."""

    def __init__(self, kinds: int, width: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = functional.linear(self.norm(self.gru(self.embedding(ids))[0]), self.embedding.weight)
        return out


def tied_words(seed: int) -> Training:
    """A language model with tied weights and smoothed labels: a warm-up to a high rate, then half a cosine."""
    random = torch.Generator().manual_seed(seed)
    ids, kinds = words()
    model = Tied(kinds)

    def loss(batch: Batch) -> Tensor:
        scores = model(batch[0]).flatten(0, 1)
        return functional.cross_entropy(scores, batch[1].flatten(), label_smoothing=0.1)

    optimizer = AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.98), weight_decay=0.05)
    training = single(model, optimizer, loss, lambda step: draw_text(random, ids, 12, 24))
    training.rate = warm_cosine(STEPS, warm=150)
    return training


class Counter(nn.Module):
    """A GRU, and one number at its end."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(x)[0][:, -1]).squeeze(1)
        return out


def adding_problem(seed: int) -> Training:
    """The sum of two marked numbers of thirty: a long plateau, then a sudden fall of the loss."""
    random = torch.Generator().manual_seed(seed)
    model = Counter()

    def batch(step: int) -> Batch:
        values = torch.rand(32, 30, generator=random)
        marked = torch.rand(32, 30, generator=random).topk(2).indices
        marks = torch.zeros(32, 30).scatter(1, marked, 1.0)
        return torch.stack([values, marks], 2), (values * marks).sum(1)

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    training = single(model, RMSprop(model.parameters(), lr=2e-3), loss, batch)
    training.max_norm = 1.0
    return training
