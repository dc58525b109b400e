"""Trainings on text and on sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.benchmarks.detection.data import characters, draw_text, words
from tests.benchmarks.detection.models import (
    GPT,
    Attention,
    Block,
    LowRank,
    MixtureOfExperts,
    Recurrent,
)
from tests.benchmarks.detection.schedules import stepped, warm_cosine
from tests.benchmarks.detection.training import Batch, Training, single

STEPS = 1000
TOKENS = 24


def _next_token(model: nn.Module, optimizer: Optimizer, ids: Tensor, seed: int, rows: int = 12) -> Training:
    random = torch.Generator().manual_seed(seed)

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return single(model, optimizer, loss, lambda step: draw_text(random, ids, rows, TOKENS))


def gpt(seed: int) -> Training:
    """A GPT on characters: AdamW, warm-up and cosine, gradients clipped at 1."""
    ids, kinds = characters()
    model = GPT(kinds)
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    training = _next_token(model, optimizer, ids, seed)
    training.rate, training.max_norm = warm_cosine(STEPS, warm=100), 1.0
    return training


def gpt_accumulation(seed: int) -> Training:
    """A GPT on words that takes a step after four micro-batches."""
    ids, kinds = words()
    model = GPT(kinds, width=24)
    training = _next_token(model, AdamW(model.parameters(), lr=2e-3), ids, seed, rows=3)
    training.rate, training.micro = warm_cosine(STEPS), 4
    return training


def lstm_words(seed: int) -> Training:
    """The word language model of PyTorch: an LSTM, plain SGD at a high rate, gradients clipped at 0.25."""
    ids, kinds = words()
    model = Recurrent(kinds, dropout=0.2)
    training = _next_token(model, SGD(model.parameters(), lr=5.0), ids, seed)
    training.rate, training.max_norm = stepped(300, 0.25), 0.25
    return training


def lstm_characters(seed: int) -> Training:
    """An LSTM on characters with Adam, not clipped."""
    ids, kinds = characters()
    model = Recurrent(kinds)
    return _next_token(model, Adam(model.parameters(), lr=4e-3), ids, seed)


class GruSeq2Seq(nn.Module):
    """An encoder's last state starts the decoder."""

    def __init__(self, kinds: int = 12, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, kinds)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.embedding(source))
        out, _ = self.decoder(self.embedding(target), state)
        logits: Tensor = self.head(out)
        return logits


class CrossBlock(Block):
    """A causal block that also attends to what the encoder made."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.ln_3, self.cross = nn.LayerNorm(width), Attention(width, 4, causal=False)

    def attend(self, x: Tensor, memory: Tensor) -> Tensor:
        """The block, with the memory in its middle."""
        x = x + self.attention(self.ln_1(x))
        x = x + self.cross(self.ln_3(x), memory)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class TransformerSeq2Seq(nn.Module):
    """One block each that encodes and decodes."""

    def __init__(self, kinds: int = 12, width: int = 32, length: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.encoder, self.decoder = Block(width, causal=False), CrossBlock(width)
        self.head = nn.Linear(width, kinds)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embedding(source) + self.positions[: source.shape[1]])
        out = self.decoder.attend(self.embedding(target) + self.positions[: target.shape[1]], memory)
        logits: Tensor = self.head(out)
        return logits


def _rewriting(
    model: nn.Module, optimizer: Optimizer, rewrite: Callable[[Tensor], Tensor], seed: int, length: int = 8
) -> Training:
    """Sequences of ten symbols, and what the model has to make of them; symbol 10 begins."""
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        source = torch.randint(10, (24, length), generator=random)
        return source, rewrite(source)

    def loss(batch: Batch) -> Tensor:
        source, target = batch
        shifted = torch.cat([torch.full((len(target), 1), 10), target[:, :-1]], 1)
        return functional.cross_entropy(model(source, shifted).flatten(0, 1), target.flatten())

    return single(model, optimizer, loss, batch)


def seq2seq_gru(seed: int) -> Training:
    """Sequences turned round by two GRUs."""
    model = GruSeq2Seq()
    return _rewriting(model, Adam(model.parameters(), lr=3e-3), lambda source: source.flip(1), seed)


def seq2seq_transformer(seed: int) -> Training:
    """Sequences sorted by an encoder and a decoder; the inverse square root schedule of the first transformer."""
    model = TransformerSeq2Seq()
    training = _rewriting(model, Adam(model.parameters(), lr=3e-3), lambda one: one.sort(1).values, seed)
    training.rate = lambda step: min((step + 1) / 80, (80 / (step + 1)) ** 0.5)
    return training


def lora(seed: int) -> Training:
    """Low-rank adapters on a GPT that knows characters, for the words of the same text turned round."""
    ids, kinds = characters()
    model = GPT(kinds)
    pretraining = _next_token(model, AdamW(model.parameters(), lr=3e-3), ids, seed + 100)
    for step in range(150):
        model.zero_grad()
        pretraining.phases[0].loss(pretraining.batch(step)).backward()
        pretraining.phases[0].optimizer.step()
    model.requires_grad_(False)
    for block in model.blocks.children():
        assert isinstance(block, Block)
        block.attention.q, block.attention.o = LowRank(block.attention.q), LowRank(block.attention.o)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = _next_token(model, AdamW(trained, lr=2e-3), ids.flip(0), seed)
    training.rate = warm_cosine(STEPS)
    return training


def moe(seed: int) -> Training:
    """A GPT whose second MLP is a mixture of experts; some get no token for many steps."""
    ids, kinds = characters()
    model = GPT(kinds)
    model.blocks[1] = Block(32, feed=MixtureOfExperts(32))
    training = _next_token(model, AdamW(model.parameters(), lr=2e-3), ids, seed)
    training.rate, training.max_norm = warm_cosine(STEPS), 1.0
    return training


def masked_words(seed: int) -> Training:
    """A transformer that fills gaps, as BERT does."""
    ids, kinds = words()
    model = GPT(kinds + 1, width=24, causal=False)
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        tokens, _ = draw_text(random, ids, 12, TOKENS)
        hidden = torch.rand(tokens.shape, generator=random) < 0.15
        return tokens.masked_fill(hidden, kinds), tokens.masked_fill(~hidden, -100)

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    training = single(model, AdamW(model.parameters(), lr=1e-3, weight_decay=0.01), loss, batch)
    training.rate = warm_cosine(STEPS)
    return training
