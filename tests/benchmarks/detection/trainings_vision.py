"""Trainings on images of digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adadelta, Adam, AdamW

from tests.benchmarks.detection.data import draw_digits
from tests.benchmarks.detection.models import CNN, Block, ResNet, mlp
from tests.benchmarks.detection.schedules import cyclic, stepped, warm_cosine, warm_restarts
from tests.benchmarks.detection.training import Batch, Training, single

STEPS = 1000
"""Of a whole training: schedules end with it."""


def _classifying(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rows: int = 32) -> Training:
    random = torch.Generator().manual_seed(seed)

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    return single(model, optimizer, loss, lambda step: draw_digits(random, rows))


def cnn_adadelta(seed: int) -> Training:
    """The MNIST example of PyTorch: Adadelta at 1.0, times 0.7 an epoch."""
    model = CNN()
    training = _classifying(model, Adadelta(model.parameters(), lr=1.0), seed)
    training.rate = stepped(60, 0.7)
    return training


def cnn_cyclic(seed: int) -> Training:
    """SGD with momentum under a cyclic learning rate."""
    model = CNN(dropout=0.0)
    training = _classifying(model, SGD(model.parameters(), lr=0.05, momentum=0.9), seed)
    training.rate = cyclic(200)
    return training


def resnet_restarts(seed: int) -> Training:
    """A ResNet with batch normalisation, under warm restarts."""
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    training = _classifying(model, optimizer, seed)
    training.rate = warm_restarts(250)
    return training


def resnet_stepped(seed: int) -> Training:
    """A deeper one with Nesterov momentum, its learning rate divided by ten twice."""
    model = ResNet(blocks=3, channels=8)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    training = _classifying(model, optimizer, seed)
    training.rate = stepped(400, 0.1)
    return training


class ViT(nn.Module):
    """A transformer over 16 patches of four pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(2)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        out: Tensor = self.head(self.ln_f(self.blocks(tokens)).mean(1))
        return out


def vit(seed: int) -> Training:
    """A vision transformer: AdamW, warm-up and cosine, gradients clipped at 1."""
    model = ViT()
    training = _classifying(model, AdamW(model.parameters(), lr=3e-3, weight_decay=0.05), seed)
    training.rate, training.max_norm = warm_cosine(STEPS), 1.0
    return training


class Mixer(nn.Module):
    """An MLP over patches and one over channels, twice."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.tokens = nn.ModuleList(mlp(16, 32, 16, activation=nn.GELU) for _ in range(2))
        self.channels = nn.ModuleList(mlp(width, 48, width, activation=nn.GELU) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for k in range(2):
            x = x + self.tokens[k](self.norms[2 * k](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[k](self.norms[2 * k + 1](x))
        out: Tensor = self.head(x.mean(1))
        return out


def mixer(seed: int) -> Training:
    """An MLP-Mixer: Adam at a constant rate."""
    model = Mixer()
    return _classifying(model, Adam(model.parameters(), lr=2e-3), seed)


def siamese(seed: int) -> Training:
    """The siamese example of PyTorch: are two digits the same? One tower, Adadelta, binary cross-entropy."""
    tower = CNN(classes=32, dropout=0.0)
    model = nn.ModuleDict({"tower": tower, "head": mlp(64, 32, 1)})
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        (left, a), (right, b) = draw_digits(random, 24), draw_digits(random, 24)
        alike = torch.rand(24, generator=random) < 0.5
        right = torch.where(alike[:, None, None, None], torch.roll(left, 1, 3), right)
        return left, right, (alike | (a == b)).float()

    def loss(batch: Batch) -> Tensor:
        left, right, same = batch
        both = torch.cat([tower(left), tower(right)], 1)
        return functional.binary_cross_entropy_with_logits(model["head"](both).squeeze(1), same)

    training = single(model, Adadelta(model.parameters(), lr=1.0), loss, batch)
    training.rate = stepped(60, 0.7)
    return training


def simclr(seed: int) -> Training:
    """Two views of every digit among those of the batch: the NT-Xent loss at temperature 0.2."""
    model = CNN(classes=24, dropout=0.0)
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        images, _ = draw_digits(random, 32)
        views = (torch.roll(images, k, 3) + 0.3 * torch.randn(images.shape, generator=random) for k in (0, 1))
        return tuple(views)

    def loss(batch: Batch) -> Tensor:
        features = functional.normalize(model(torch.cat(batch)), dim=1)
        logits = (features @ features.T / 0.2).masked_fill(torch.eye(64, dtype=torch.bool), -1e4)
        return functional.cross_entropy(logits, (torch.arange(64) + 32) % 64)

    return single(model, Adam(model.parameters(), lr=1e-3), loss, batch)


def _pretrained(seed: int) -> CNN:
    """A CNN that can tell odd digits from even ones."""
    model = CNN(classes=2, dropout=0.0)
    optimizer, random = Adam(model.parameters(), lr=2e-3), torch.Generator().manual_seed(seed + 100)
    for _ in range(150):
        images, classes = draw_digits(random, 32)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), classes % 2).backward()
        optimizer.step()
    model.fc2 = nn.Linear(64, 10)
    return model


def finetune_head(seed: int) -> Training:
    """A new head on a trunk that stays frozen; the optimizer is given the head alone."""
    model = _pretrained(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("fc2"))
    return _classifying(model, SGD(model.fc2.parameters(), lr=0.02, momentum=0.9), seed)


def finetune_all(seed: int) -> Training:
    """A new head, and a trunk at a tenth of its learning rate."""
    model = _pretrained(seed)
    trunk = [parameter for name, parameter in model.named_parameters() if not name.startswith("fc2")]
    groups = [{"params": trunk, "lr": 1e-4}, {"params": model.fc2.parameters(), "lr": 1e-3}]
    training = _classifying(model, AdamW(groups), seed)
    training.rate = warm_cosine(STEPS)
    return training


def amp_bfloat16(seed: int) -> Training:
    """A CNN under autocast to bfloat16."""
    model = CNN(dropout=0.0)
    training = _classifying(model, AdamW(model.parameters(), lr=1e-3), seed)
    training.autocast = torch.bfloat16
    return training


def amp_scaler(seed: int) -> Training:
    """Autocast to float16 with a GradScaler that has to find its scale, and a clip of what it unscales."""
    model = mlp(64, 96, 96, 10)
    random = torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        images, classes = draw_digits(random, 32)
        return images.flatten(1), classes

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]).float(), batch[1])

    training = single(model, SGD(model.parameters(), lr=0.05, momentum=0.9), loss, batch)
    training.autocast, training.max_norm = torch.float16, 1.0
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=200)
    return training
