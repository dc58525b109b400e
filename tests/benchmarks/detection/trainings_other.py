"""Trainings on graphs, tables, ratings and equations, and a model wrapped in DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW

from tests.benchmarks.detection.data import draw_clusters, draw_regression, graph
from tests.benchmarks.detection.models import mlp
from tests.benchmarks.detection.schedules import stepped, warm_cosine
from tests.benchmarks.detection.training import Batch, Training, single

STEPS = 1000


class GCN(nn.Module):
    """Two graph convolutions."""

    def __init__(self, out: int = 3, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, width), nn.Linear(width, out)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        out: Tensor = adjacency @ self.second(
            functional.dropout(functional.relu(adjacency @ self.first(x)), 0.5, self.training)
        )
        return out


def gcn(seed: int) -> Training:
    """The GCN example: a whole graph is the batch of every step, a fifth of its nodes are labelled."""
    adjacency, features, blocks = graph()
    model = GCN()

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0], adjacency)[:24], batch[1][:24])

    optimizer = Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    return single(model, optimizer, loss, lambda step: (features, blocks))


def link_prediction(seed: int) -> Training:
    """Which nodes are linked? A graph autoencoder that is shown drawn pairs."""
    adjacency, features, _ = graph()
    model, random = GCN(out=8), torch.Generator().manual_seed(seed)
    linked = adjacency.nonzero()

    def batch(step: int) -> Batch:
        edges = linked[torch.randint(len(linked), (96,), generator=random)]
        return edges, torch.randint(120, (96, 2), generator=random)

    def loss(batch: Batch) -> Tensor:
        nodes = model(features, adjacency)
        near, far = ((nodes[pairs[:, 0]] * nodes[pairs[:, 1]]).sum(1) for pairs in batch)
        return functional.softplus(-near).mean() + functional.softplus(far).mean()

    return single(model, Adam(model.parameters(), lr=5e-3), loss, batch)


def lbfgs(seed: int) -> Training:
    """The time sequence example: sine waves learned with LBFGS, the whole set a batch."""
    random = torch.Generator().manual_seed(seed)
    model = mlp(4, 16, 1, activation=nn.Tanh)
    waves = torch.sin(torch.arange(40) / 4 + 6 * torch.rand(16, 1, generator=random))
    windows = waves.unfold(1, 5, 1).reshape(-1, 5)
    windows = windows + 0.05 * torch.randn(windows.shape, generator=random)

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    training = single(
        model,
        LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
        loss,
        lambda step: (windows[:, :4], windows[:, 4:]),
    )
    training.closure = True
    return training


def pinn(seed: int) -> Training:
    """A physics-informed network: a damped oscillation from its equation alone, by derivatives of the output."""
    model, random = mlp(1, 32, 32, 1, activation=nn.Tanh), torch.Generator().manual_seed(seed)

    def loss(batch: Batch) -> Tensor:
        time = batch[0].requires_grad_(True)
        out = model(time)
        (speed,) = torch.autograd.grad(out.sum(), time, create_graph=True)
        (force,) = torch.autograd.grad(speed.sum(), time, create_graph=True)
        start = torch.zeros(1, 1, requires_grad=True)
        first = model(start)
        (push,) = torch.autograd.grad(first.sum(), start, create_graph=True)
        return ((force + 0.4 * speed + 4 * out) ** 2).mean() + 10 * ((first - 1) ** 2 + push**2).sum()

    training = single(
        model,
        Adam(model.parameters(), lr=2e-3),
        loss,
        lambda step: (4 * torch.rand(64, 1, generator=random),),
    )
    training.rate = stepped(400, 0.3)
    return training


class Factors(nn.Module):
    """Users and items as vectors, and an MLP on both."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(200, 12), nn.Embedding(600, 12)
        self.head = mlp(24, 32, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.users(user), self.items(item)], 1)).squeeze(1)
        return out


def recommender(seed: int) -> Training:
    """Ratings by few users of few items and many seldom seen ones, with Adagrad."""
    model, random = Factors(), torch.Generator().manual_seed(seed)
    popular = 1 / torch.arange(1, 601.0)

    def batch(step: int) -> Batch:
        user = torch.randint(200, (64,), generator=random)
        item = torch.multinomial(popular, 64, True, generator=random)
        return user, item, ((user * 7 + item * 3) % 5 < 2).float()

    def loss(batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2])

    return single(model, Adagrad(model.parameters(), lr=0.05), loss, batch)


def ddp(seed: int) -> Training:
    """An MLP in DistributedDataParallel on one rank: gradients lie in buckets and go through a reduction."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(mlp(32, 64, 64, 64, 10))
    random = torch.Generator().manual_seed(seed)

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = single(model, optimizer, loss, lambda step: draw_clusters(random, 64, 2.0))
    training.rate, training.close = warm_cosine(STEPS), dist.destroy_process_group
    return training


def multitask(seed: int) -> Training:
    """A trunk with two heads that are trained in turns, so every second step has norms of its own."""
    trunk, heads = mlp(32, 64, 64), nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 1)])
    model, random = nn.ModuleDict({"trunk": trunk, "heads": heads}), torch.Generator().manual_seed(seed)

    def batch(step: int) -> Batch:
        x, classes = draw_clusters(random, 48, 2.0)
        return x, classes, torch.tensor(step % 2)

    def loss(batch: Batch) -> Tensor:
        x, classes, task = batch
        features = trunk(x).relu()
        if task:
            return functional.mse_loss(heads[1](features).squeeze(1), x[:, 0])
        return functional.cross_entropy(heads[0](features), classes)

    return single(model, Adam(model.parameters(), lr=1e-3), loss, batch)


def tabular(seed: int) -> Training:
    """A regression with batch normalisation, dropout and GELU on a table."""
    layers: list[nn.Module] = []
    for before in (10, 48, 48):
        layers += [nn.Linear(before, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.1)]
    model, random = nn.Sequential(*layers, nn.Linear(48, 1)), torch.Generator().manual_seed(seed)

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    training = single(
        model, AdamW(model.parameters(), lr=3e-3), loss, lambda step: draw_regression(random, 64)
    )
    training.rate = warm_cosine(STEPS)
    return training
