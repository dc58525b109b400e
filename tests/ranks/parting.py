"""Two ranks that clip every step, and an action that fails on rank 1 only: for a moment, for good, or for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from torch.nn.parallel import DistributedDataParallel

from gradwatch.capture.optimizer_capture import OptimizerCapture
from tests.ranks.trials import made, take_step, told, watched, weights

STEPS, AT = 8, 4
TALKING = """
version: 1
clip: {total: {method: norm, max_norm: 0.05}}
rules:
  nan: {detect: {kind: nonfinite}, do: [skip_step: {max_consecutive: 3, then: stop}]}
  rank-mismatch: {detect: {kind: rank_mismatch}, severity: critical}
"""
SILENT = TALKING.replace("  rank-mismatch: {detect: {kind: rank_mismatch}, severity: critical}\n", "")


def failing(rank: int, text: str, broken: Callable[[int], bool], times: int) -> dict[str, Any]:
    """Train; at step `AT` the multiplication fails so many times on the ranks that are `broken`."""
    _, model, optimizer = made(DistributedDataParallel)
    multiply, left = OptimizerCapture.multiply, [0]

    def multiplied(captured: OptimizerCapture, coefficient: np.float32) -> None:
        if left[0]:
            left[0] -= 1
            raise MemoryError("injected")
        multiply(captured, coefficient)

    hashes: list[str] = []
    said: list[str] = []
    with (
        mock.patch.object(OptimizerCapture, "multiply", multiplied),
        watched(model, optimizer, text, strict=False) as (gw, collector),
    ):
        gw.health.on_first = lambda component, error: said.append(f"{component}: {error}")
        for step in range(STEPS):
            left[0] = times if step == AT and broken(rank) else 0
            take_step(model, optimizer, step, rank)
            hashes.append(weights(model))
        return {
            "hashes": hashes,
            "mismatch": told(collector, "rank-mismatch"),
            "applied": [record.snapshot.total_norm_applied for record in collector.records],
            "errors": gw.health.errors(),
            "said": said,
            "healthy": gw.healthy,
        }


SITUATIONS: dict[str, Callable[[int], Any]] = {
    "for a moment": lambda rank: failing(rank, TALKING, lambda rank: rank == 1, 1),
    "for good": lambda rank: failing(rank, TALKING, lambda rank: rank == 1, 9),
    "on both": lambda rank: failing(rank, TALKING, lambda rank: True, 9),
    "untold": lambda rank: failing(rank, SILENT, lambda rank: rank == 1, 9),
}
