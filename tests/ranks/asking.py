"""Two ranks of which only the first asks whether its weights are healthy."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwatch.distributed import process_group
from tests.ranks.trials import made, take_step, watched, weights

STEPS, RUINED_AT = 6, 4
RULES = """version: 1
rules:
  nan: {detect: {kind: nonfinite}, do: [skip_step]}
  rank-mismatch: {detect: {kind: rank_mismatch}, severity: critical}
"""


def asked(rank: int, wrap: Any) -> dict[str, Any]:
    """The answers of rank 0, whose own weights are overwritten before the last steps; hashes and the longest step."""
    _, model, optimizer = made(wrap)
    answers: list[bool] = []
    longest = 0.0
    with watched(model, optimizer, RULES) as (gw, _):
        for step in range(STEPS):
            began = time.monotonic()
            take_step(model, optimizer, step, rank)
            if rank == 0:
                if step == RUINED_AT:
                    param = next(iter(model.parameters()))
                    held = param.to_local() if hasattr(param, "to_local") else param.detach()
                    kept = held.clone()
                    with torch.no_grad():
                        held.fill_(float("nan"))
                    answers.append(gw.healthy)
                    with torch.no_grad():
                        held.copy_(kept)
                answers.append(gw.healthy)
            longest = max(longest, time.monotonic() - began)
        return {
            "answers": answers,
            "weights": weights(model),
            "errors": gw.health.errors(),
            "waited": longest >= process_group.WAIT_SECONDS / 2,
        }


SITUATIONS = {
    "ddp": lambda rank: asked(rank, DistributedDataParallel),
    "fsdp2": lambda rank: asked(rank, fully_shard),
}
