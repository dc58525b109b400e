"""Healthy trainings that come down to next to nothing: `python -m tests.benchmarks.detection.converging`.

Fits that interpolate, satisfied hinges, rewards that come no more. Every alarm of theirs (warning or critical) is told,
as is their rate by 1,000 steps; `--rules` compares rule files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer, RMSprop

import gradwatch
from gradwatch.rules.rule_set import RuleSet
from tests.support.kept import Kept

STEPS = 2000


class Converging(NamedTuple):
    """A model, its optimizer, and the loss of its next step."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[], Tensor]


def mlp(inputs: int, outputs: int, hidden: int = 32) -> nn.Sequential:
    """Two hidden layers."""
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden, outputs))


def hinge() -> Converging:
    """A margin that is met by all samples in the end: most batches have no loss at all."""
    x, model = torch.randn(200, 10), mlp(10, 1)
    y = (x[:, 0] > 0).float() * 2 - 1

    def loss() -> Tensor:
        rows = torch.randint(200, (16,))
        return functional.relu(1 - y[rows] * model(x[rows])[:, 0]).mean()

    return Converging(model, SGD(model.parameters(), 0.05), loss)


def interpolating() -> Converging:
    """More weights than samples, in batches."""
    x, y, model = torch.randn(64, 10), torch.randn(64, 1), mlp(10, 1, 128)

    def loss() -> Tensor:
        rows = torch.randint(64, (16,))
        return functional.mse_loss(model(x[rows]), y[rows])

    return Converging(model, Adam(model.parameters(), 1e-3), loss)


def interpolating_whole() -> Converging:
    """The same, all samples at each step, by a rate at which Adam is not always stable."""
    x, y, model = torch.randn(64, 10), torch.randn(64, 1), mlp(10, 1, 128)
    return Converging(model, Adam(model.parameters(), 3e-3), lambda: functional.mse_loss(model(x), y))


def separable() -> Converging:
    """Classes that a model separates."""
    x, model = torch.randn(300, 10), mlp(10, 3, 64)
    y = (x @ torch.randn(10, 3)).argmax(1)

    def loss() -> Tensor:
        rows = torch.randint(300, (32,))
        return functional.cross_entropy(model(x[rows]), y[rows])

    return Converging(model, Adam(model.parameters(), 3e-3), loss)


def sparse_reward() -> Converging:
    """REINFORCE without a baseline: a reward for one of five actions in one of ten states."""
    model = mlp(6, 5)

    def loss() -> Tensor:
        x = torch.randn(16, 6)
        policy = Categorical(logits=model(x))
        action = policy.sample()
        return -(policy.log_prob(action) * ((action == 3) & (x[:, 0] > 1.2)).float()).mean()

    return Converging(model, Adam(model.parameters(), 3e-3), loss)


def rare_episodes() -> Converging:
    """REINFORCE on a walk of ten steps that is rewarded where it gets far."""
    model = mlp(4, 2)

    def loss() -> Tensor:
        place, logs = 0, []
        for k in range(10):
            policy = Categorical(logits=model(torch.tensor([[place / 10, k / 10, 1.0, place * k / 100]])))
            action = policy.sample()
            logs.append(policy.log_prob(action))
            place += 1 if action.item() else -1
        return -(torch.cat(logs).sum() * (1.0 if place >= 6 else 0.0))

    return Converging(model, Adam(model.parameters(), 1e-2), loss)


def bandit() -> Converging:
    """A contextual bandit with a baseline."""
    model, usual = mlp(3, 4, 16), [0.0]

    def loss() -> Tensor:
        x = torch.randn(8, 3)
        policy = Categorical(logits=model(x))
        action = policy.sample()
        reward = (action == x.argmax(1)).float()
        usual[0] += 0.05 * (float(reward.mean()) - usual[0])
        return -(policy.log_prob(action) * (reward - usual[0])).mean()

    return Converging(model, SGD(model.parameters(), 0.1), loss)


def triplets() -> Converging:
    """Five classes that are soon further apart than the margin."""
    x, model = torch.randn(5, 8) * 3, mlp(8, 8)

    def embedded(classes: Tensor) -> Tensor:
        found: Tensor = model(x[classes] + 0.3 * torch.randn(16, 8))
        return found

    def loss() -> Tensor:
        one = torch.randint(5, (16,))
        other = (one + torch.randint(1, 5, (16,))) % 5
        return functional.triplet_margin_loss(embedded(one), embedded(one), embedded(other), margin=1.0)

    return Converging(model, Adam(model.parameters(), 1e-3), loss)


def rosenbrock() -> Converging:
    """Two numbers, in a narrow valley."""
    model = nn.ParameterList([nn.Parameter(torch.tensor([-1.2, 1.0]))])

    def loss() -> Tensor:
        x = model[0]
        return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2

    return Converging(model, Adam(model.parameters(), 1e-2), loss)


def least_squares() -> Converging:
    """A linear model with an exact answer, by SGD with momentum: down to the rounding of float32."""
    x, model = torch.randn(100, 20), nn.Linear(20, 1)
    y = x[:, :3].sum(1)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return Converging(model, optimizer, lambda: functional.mse_loss(model(x)[:, 0], y))


def table_of_values() -> Converging:
    """Fifty states, three actions, values that do not change."""
    x, values, model = torch.randn(50, 6), torch.randn(50, 3), mlp(6, 3, 64)

    def loss() -> Tensor:
        rows, actions = torch.randint(50, (8,)), torch.randint(3, (8,))
        chosen = model(x[rows]).gather(1, actions[:, None])[:, 0]
        return functional.smooth_l1_loss(chosen, values[rows].gather(1, actions[:, None])[:, 0])

    return Converging(model, RMSprop(model.parameters(), 1e-3), loss)


LATE = 600
"""The step from which on a loss is wrong in `noise_floor`."""


def noise_floor() -> Converging:
    """A linear model of targets in thousands, down to their noise; its loss is times 1e-7 in the end, by mistake."""
    weights, model, step = torch.randn(8, 1) * 1000, nn.Linear(8, 1), [0]

    def loss() -> Tensor:
        x = torch.randn(64, 8)
        step[0] += 1
        found = functional.mse_loss(model(x), x @ weights + 0.3 * torch.randn(64, 1))
        return found if step[0] <= LATE else found * 1e-7

    return Converging(model, SGD(model.parameters(), 0.05), loss)


TRAININGS: tuple[Callable[[], Converging], ...] = (
    hinge,
    interpolating,
    interpolating_whole,
    separable,
    sparse_reward,
    rare_episodes,
    bandit,
    triplets,
    rosenbrock,
    least_squares,
    table_of_values,
)


def alarms_of(
    make: Callable[[], Converging], seed: int, rules: str | RuleSet, steps: int = STEPS
) -> list[str]:
    """`rule@step` of each alarm of one training."""
    torch.manual_seed(seed)
    made, kept = make(), Kept()
    with gradwatch.watch(made.model, made.optimizer, rules=rules, sinks=[kept]):
        for _ in range(steps):
            made.optimizer.zero_grad()
            made.loss().backward()
            made.optimizer.step()
    events = [event for record in kept.records for event in record.verdict.events]
    return [
        f"{event.rule}@{event.step}"
        for event in events
        if event.kind == "firing" and event.notify and event.severity != "info"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the alarms of each training, and their rate."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.detection.converging", description=__doc__
    )
    parser.add_argument("--rules", action="append", default=[], metavar="PACK|FILE", help="default: default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)
    for rules in options.rules or ["default"]:
        count = 0
        for make in TRAININGS:
            for seed in options.seeds:
                found = alarms_of(make, seed, rules, options.steps)
                count += len(found)
                print(f"{rules}: {make.__name__} {seed}: {', '.join(found) or '–'}", flush=True)
        steps = len(TRAININGS) * len(options.seeds) * options.steps
        print(f"{rules}: {count} alarms in {steps:,} steps, {1000 * count / steps:.2f} per 1,000")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
