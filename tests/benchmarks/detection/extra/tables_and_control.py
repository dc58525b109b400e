"""Trainings on tables, distributions, tasks and control. N rows, T steps of an episode."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Adagrad, Adam, Adamax, AdamW

from tests.benchmarks.detection.data import draw_digits
from tests.benchmarks.detection.models import mlp
from tests.benchmarks.detection.schedules import warm_cosine
from tests.benchmarks.detection.training import Batch, Training, single

STEPS = 1000


def mixture_density(seed: int) -> Training:
    """A density of five bells for a curve that is no function; its loss becomes negative."""
    random = torch.Generator().manual_seed(seed)
    model = mlp(1, 48, 48, 15, activation=nn.Tanh)

    def batch(step: int) -> Batch:
        y = 2 * torch.rand(64, generator=random) - 1
        x = y + 0.3 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn(64, generator=random)
        return x.unsqueeze(1), y

    def loss(batch: Batch) -> Tensor:
        weights, means, widths = model(batch[0]).chunk(3, 1)
        bells = Normal(means, functional.softplus(widths) + 1e-3)
        return -MixtureSameFamily(Categorical(logits=weights), bells).log_prob(batch[1]).mean()

    return single(model, Adam(model.parameters(), lr=3e-3), loss, batch)


class WideAndDeep(nn.Module):
    """A linear part and embeddings under an MLP, for three quantiles."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 3)
        self.shops, self.days = nn.Embedding(120, 8), nn.Embedding(7, 4)
        self.deep = mlp(20, 48, 24, 3)

    def forward(self, numbers: Tensor, shops: Tensor, days: Tensor) -> Tensor:
        together = torch.cat([numbers, self.shops(shops), self.days(days)], 1)
        out: Tensor = self.wide(numbers) + self.deep(together)
        return out


def quantiles(seed: int) -> Training:
    """Sales with heavy tails by shop and day: the loss of three quantiles, summed, with Adagrad."""
    random = torch.Generator().manual_seed(seed)
    model, popular = WideAndDeep(), 1 / torch.arange(1, 121.0)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def batch(step: int) -> Batch:
        numbers = torch.randn(64, 8, generator=random)
        shops = torch.multinomial(popular, 64, True, generator=random)
        days = torch.randint(7, (64,), generator=random)
        noise = torch.randn(64, generator=random) / (0.1 + torch.rand(64, generator=random))
        return numbers, shops, days, numbers[:, :3].sum(1) + shops % 5 + (days > 4) * 2 + noise

    def loss(batch: Batch) -> Tensor:
        apart = batch[3].unsqueeze(1) - model(*batch[:3])
        return torch.maximum(levels * apart, (levels - 1) * apart).sum()

    return single(model, Adagrad(model.parameters(), lr=0.05), loss, batch)


def meta_learning(seed: int) -> Training:
    """MAML on sines: the gradient goes through a step of gradient descent on each of four tasks."""
    random = torch.Generator().manual_seed(seed)
    model = mlp(1, 40, 40, 1)

    def batch(step: int) -> Batch:
        height, phase = (torch.rand(4, 1, 1, generator=random) for _ in range(2))
        x = 10 * torch.rand(4, 20, 1, generator=random) - 5
        return x, (0.1 + 4.9 * height) * torch.sin(x + math.pi * phase)

    def loss(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(*batch, strict=True):
            weights = dict(model.named_parameters())
            inner = functional.mse_loss(functional_call(model, weights, (x[:10],)), y[:10])
            found = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            adapted = {name: one - 0.01 * by for (name, one), by in zip(weights.items(), found, strict=True)}
            total = total + functional.mse_loss(functional_call(model, adapted, (x[10:],)), y[10:]) / 4
        return total

    return single(model, Adam(model.parameters(), lr=1e-3), loss, batch)


def reach(seed: int) -> Training:
    """REINFORCE with a Gaussian policy: a point mass has to come to a place, rewards by its distance."""
    random = torch.Generator().manual_seed(seed)
    policy, value = mlp(4, 32, 2, activation=nn.Tanh), mlp(4, 32, 1, activation=nn.Tanh)
    spread = nn.Parameter(torch.full((2,), -0.5))
    model = nn.ModuleDict({"policy": policy, "value": value})
    model.register_parameter("spread", spread)

    def batch(step: int) -> Batch:
        return torch.randn(12, 2, generator=random), torch.randn(15, 12, 2, generator=random)

    def loss(batch: Batch) -> Tensor:
        goal, noise = batch
        place = torch.zeros(12, 2)
        logs, values, rewards = [], [], []
        for drawn in noise:
            seen = torch.cat([place, goal], 1)
            chosen = Normal(policy(seen), spread.exp())
            action = (chosen.mean + chosen.stddev * drawn).detach()
            place = place + 0.3 * action.clamp(-1, 1)
            logs.append(chosen.log_prob(action).sum(1))
            values.append(value(seen).squeeze(1))
            rewards.append(-(place - goal).norm(dim=1))
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        better = returns - torch.stack(values)
        return -(torch.stack(logs) * better.detach()).mean() + 0.5 * better.pow(2).mean()

    return single(model, AdamW(model.parameters(), lr=3e-3), loss, batch)


def restoration(seed: int) -> Training:
    """Blurred digits made sharp: absolute errors summed over the batch, Adamax with warm-up and cosine."""
    random = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 12, 5, padding=2), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(12, 16, 3, padding=1), nn.LeakyReLU(0.2)),
        nn.Conv2d(16, 1, 3, padding=1),
    )

    def batch(step: int) -> Batch:
        images, _ = draw_digits(random, 32)
        blurred = functional.avg_pool2d(images, 3, stride=1, padding=1)
        return blurred + 0.1 * torch.randn(images.shape, generator=random), images

    def loss(batch: Batch) -> Tensor:
        return functional.l1_loss(model(batch[0]), batch[1], reduction="sum")

    training = single(model, Adamax(model.parameters(), lr=1e-2), loss, batch)
    training.rate = warm_cosine(STEPS)
    return training
