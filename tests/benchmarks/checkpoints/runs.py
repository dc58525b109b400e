"""One training as a user runs it who keeps checkpoints, and what each of them is worth.

A checkpoint is *lost* if going on from its weights, as a new training with sane settings and for as many steps as
the whole training has, does not come to what the worst of some trainings from a new model comes to: starting afresh
would be better.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

import gradwatch
from tests.benchmarks.checkpoints.faults import Fault
from tests.benchmarks.checkpoints.trainings import Training, rng

EVERY = 50
BARE = 4
TOLERANCE = 0.05
"""Of the way from the loss of a new model to that of a trained one."""


@dataclass(frozen=True)
class Checkpoint:
    """Asked after `step` steps; `reached` = the score from there on."""

    step: int
    healthy: bool
    because: str
    firing: tuple[str, ...]
    score: float
    reached: float
    lost: bool


def train_step(
    training: Training, model: nn.Module, optimizers: list[Optimizer], step: int, sign: float = 1.0
) -> None:
    """One step of every optimizer."""
    for (_, loss_of), optimizer in zip(training.losses.items(), optimizers, strict=True):
        loss = sign * loss_of(model, rng(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def reached_from(training: Training, model: nn.Module, begins: int = 10_000) -> float:
    """The score after a whole training from these weights."""
    model = copy.deepcopy(model)
    optimizers = training.optimizers(model)
    for step in range(training.steps):
        train_step(training, model, optimizers, begins + step)
    return training.scored(model)


def checkpoints(training: Training, fault: Fault | None, rules: str, seed: int = 0) -> list[Checkpoint]:
    """Every `EVERY` steps: what `healthy` says, and what is true."""
    fresh = [training.built(seed + k)[0] for k in range(BARE)]
    at_first = max(training.scored(model) for model in fresh)
    bare = max(reached_from(training, model, 10_000 * k) for k, model in enumerate(fresh))
    bound = bare + TOLERANCE * max(at_first - bare, 0.0) + 1e-3
    model, optimizers = training.built(seed)
    found = []
    with gradwatch.watch(model, optimizers, rules=rules) as gw:
        for step in range(training.steps):
            sign = 1.0
            if fault is not None and step >= fault.begins:
                if step == fault.begins:
                    fault.once(model, optimizers)
                sign = fault.sign if fault.steps is None or step < fault.begins + fault.steps else 1.0
            train_step(training, model, optimizers, step, sign)
            if (step + 1) % EVERY == 0:
                healthy = gw.healthy
                status = gw.status()
                because = "; ".join(status["unhealthy_because"])
                reached = reached_from(training, model)
                lost = not (math.isfinite(reached) and reached <= bound)
                found.append(
                    Checkpoint(
                        step + 1,
                        healthy,
                        because,
                        tuple(status["firing"]),
                        training.scored(model),
                        reached,
                        lost,
                    )
                )
    return found
