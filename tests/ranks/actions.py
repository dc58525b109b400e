"""Two ranks, rules that clip, skip, rescale and stop, and faults in rank 1's own gradients only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.errors import TrainingStopped
from tests.ranks.launch import TRIALS, fingerprint
from tests.ranks.situations import batch, fsdp2, loss_of
from tests.ranks.trials import Poison, made, take_step, watched, weights

WARM = 25
ACTING = """
version: 1
defaults: {warmup: 20}
rules:
  nan: {detect: {kind: nonfinite}, severity: critical, do: [skip_step]}
  spike: {detect: {kind: spike, above: 8}, do: [clip: {to: baseline}, escalate: {after: 3 in 8, to: skip_step}]}
  total: {detect: {kind: spike, of: total_norm, above: 6}, do: [clip: {to: baseline}]}
  slow: {detect: {kind: above, threshold: 50}, do: [rescale: {factor: 0.5}]}
"""
STOPPING = "version: 1\nrules: {r: {detect: {kind: nonfinite}, severity: critical, do: [stop]}}\n"


def trials(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """`TRIALS` faults, each NaN, Inf or a spike, in one parameter (the loss, where gradients are sharded)."""
    generator = random.Random(11)
    plain, model, optimizer = made(wrap)
    names = [name for name, _ in plain.named_parameters()]
    poisons = {} if wrap is fsdp2 else {name: Poison(plain, rank, name) for name in names}
    faults = [
        (generator.choice(names), generator.choice([math.nan, math.inf, 1e3, 1e4, 1e5, 1e6]))
        for _ in range(TRIALS)
    ]
    with watched(model, optimizer, ACTING) as (gw, collector):
        for step in range(WARM):
            take_step(model, optimizer, step, rank)
        hashes, applied, step = [], [], WARM
        for name, value in faults:
            for _ in range(generator.randint(1, 4)):
                take_step(model, optimizer, step, rank)
                step += 1
            if poisons:
                poisons[name].now, poisons[name]._value = True, value
                take_step(model, optimizer, step, rank)
                poisons[name].now = False
            else:
                optimizer.zero_grad()
                loss = loss_of(model, batch(step, 0, rank))
                (loss * (value if rank == 1 else 1.0)).backward()
                optimizer.step()
            step += 1
            hashes.append([weights(model), _state(optimizer)])
            applied.append(collector.records[-1].snapshot.coef.tolist())
        records = collector.records
        return {
            "hashes": hashes,
            "coef": applied,
            "told": [
                sorted(repr(order) for order in record.decision.orders)
                for record in records
                if record.decision.orders
            ],
            "did": sorted({f"{o.rule} {o.action}" for record in records for o in record.decision.orders}),
            "skipped": [record.snapshot.step for record in records if record.decision.skip],
            "health": [gw.healthy, gw.last_healthy_step],
            "errors": gw.health.errors(),
        }


def _state(optimizer: Any) -> str:
    """A hash of AdamW's moments (of this rank's shards, where they are sharded)."""
    found = [value for entry in optimizer.state.values() for value in entry.values()]
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in found]
    return fingerprint(whole)


def stopping(rank: int) -> dict[str, Any]:
    """Rank 1's NaN stops both, at the same step, before either has moved."""
    plain, model, optimizer = made(DistributedDataParallel)
    poison = Poison(plain, rank, "b.weight")
    with watched(model, optimizer, STOPPING) as (gw, collector):
        for step in range(10):
            poison.now = step == 6
            before = weights(model)
            try:
                take_step(model, optimizer, step, rank)
            except TrainingStopped as stopped:
                return {
                    "step": step,
                    "said": str(stopped),
                    "moved": weights(model) != before,
                    "hash": weights(model),
                    "recorded": collector.records[-1].decision.stop,
                    "errors": gw.health.errors(),
                }
    return {"step": None}


SITUATIONS: dict[str, Callable[[int], Any]] = {
    "trials under ddp": lambda rank: trials(rank, DistributedDataParallel),
    "trials under fsdp2": lambda rank: trials(rank, fsdp2),
    "stopping": stopping,
}
