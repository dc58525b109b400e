"""Sharded parameters (FSDP2, two ranks) under an optimizer that evaluates its closure twice in one step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwatch.session.watch import session_of
from tests.ranks.faults import ACTING
from tests.ranks.situations import batch
from tests.ranks.trials import watched, weights

STEPS, INJURED = 6, 3
LOOSE = ACTING.replace("max_norm: 0.05", "max_norm: 1e9")


class ClimbsFirst(torch.optim.SGD):
    """Sharpness-aware: climbs, evaluates again, comes back and takes the step of its base class."""

    second: float = 0.0  # the norm of this rank's shard as the step uses it

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        params = [param for group in self.param_groups for param in group["params"]]
        climbs = [(param, param.grad * 0.05) for param in params if param.grad is not None]
        with torch.no_grad():
            for param, climb in climbs:
                param.add_(climb)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for param, climb in climbs:
                param.sub_(climb)
        shards = [param.grad.to_local().norm() for param in params if param.grad is not None]
        self.second = float(torch.stack(shards).norm()) if shards else 0.0
        return super().step()


def first_gradient(model: Any, step: int) -> float:
    """The norm of the gradient averaged over both ranks at the present weights, in float64."""
    weight = model.weight.full_tensor().detach().double().requires_grad_(True)
    for rank in range(2):
        ((batch(step, 0, rank).double() @ weight.t()).square().mean() / 2).backward()
    return float(weight.grad.norm())


def spoilt(out: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is NaN in the first row of the weight alone."""
    return out[:, 1:].square().mean() + (out[:, 0] * math.nan).mean()


def twice(rank: int, injured: int, text: str) -> dict[str, Any]:
    """NaN in evaluation `injured` (1, 2, 0 = none) of one step, and only in the rows that rank 0 holds."""
    torch.manual_seed(3)
    model: Any = fully_shard(nn.Linear(6, 4, bias=False))
    optimizer = ClimbsFirst(model.parameters(), lr=0.01)
    wants, hashes, seconds, untouched, shards = [], [], [], [], []
    with watched(model, optimizer, text) as (gw, collector):
        for step in range(STEPS):
            count, left = [0], [0.0]

            def closure(step: int = step, count: list[int] = count, left: list[float] = left) -> Any:
                optimizer.zero_grad()
                count[0] += 1
                out = model(batch(step, 0, rank))
                broken = (step, count[0]) == (INJURED, injured)
                loss = spoilt(out) if broken else out.square().mean()
                loss.backward()
                left[0] = float(model.weight.grad.to_local().norm())
                if broken:
                    shards.append(math.isfinite(left[0]))
                return loss

            wants.append(first_gradient(model, step))
            started = time.monotonic()
            optimizer.step(closure)
            seconds.append(time.monotonic() - started)
            untouched.append(optimizer.second == left[0] or math.isnan(left[0]))
            hashes.append(weights(model))
        return {
            "wants": wants,
            "totals": [record.snapshot.total_norm for record in collector.records],
            "applied": [record.snapshot.total_norm_applied for record in collector.records],
            "steps": [record.snapshot.step for record in collector.records],
            "skipped": [record.snapshot.step for record in collector.records if record.decision.skip],
            "hashes": hashes,
            "seconds": max(seconds),
            "untouched": untouched,
            "finite shard": shards,
            "errors": gw.health.errors(),
            "alone": session_of(gw).attached.degraded,
        }


class Twice(torch.optim.SGD):
    """Evaluates twice at the same weights; `norms` of the gradients as it is given them."""

    norms: tuple[float, ...] = ()

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        found = []
        for _ in range(2):
            with torch.enable_grad():
                closure()
            grads = [param.grad for group in self.param_groups for param in group["params"]]
            found.append(float(torch.cat([grad.flatten() for grad in grads if grad is not None]).norm()))
        self.norms = tuple(found)
        return super().step()


def replicas(rank: int, injured: int) -> dict[str, Any]:
    """DDP, and rules that make the ranks talk: NaN on rank 1 in evaluation `injured` of one step."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(6, 4, bias=False))
    optimizer = Twice(model.parameters(), lr=0.01)
    norms, hashes = [], []
    with watched(model, optimizer, ACTING) as (gw, collector):
        for step in range(STEPS):
            count = [0]

            def closure(step: int = step, count: list[int] = count) -> Any:
                optimizer.zero_grad()
                count[0] += 1
                out = model(batch(step, 0, rank))
                broken = rank == 1 and (step, count[0]) == (INJURED, injured)
                (spoilt(out) if broken else out.square().mean() * count[0]).backward()

            optimizer.step(closure)
            norms.append(optimizer.norms)
            hashes.append(weights(model))
        return {
            "norms": [pair for step, pair in enumerate(norms) if step != INJURED],
            "skipped": [record.decision.skip for record in collector.records].count(True),
            "hashes": hashes,
            "errors": gw.health.errors(),
            "alone": session_of(gw).attached.degraded,
        }


REPLICAS: dict[str, Callable[[int], Any]] = {
    f"replicas {injured}": (lambda rank, injured=injured: replicas(rank, injured)) for injured in (0, 1, 2)
}
SHARDED: dict[str, Callable[[int], Any]] = {
    "healthy": lambda rank: twice(rank, 0, LOOSE),
    "clipped": lambda rank: twice(rank, 0, ACTING),
    "first": lambda rank: twice(rank, 1, LOOSE),
    "second": lambda rank: twice(rank, 2, LOOSE),
}
SITUATIONS = SHARDED | REPLICAS
