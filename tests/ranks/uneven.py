"""Two ranks under DDP of which one has more batches than the other: `with ddp.join():`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwatch.distributed import process_group
from tests.ranks.launch import fingerprint
from tests.ranks.situations import Net, batch, loss_of
from tests.ranks.trials import watched

RULES = "version: 1\nextends: [default]\n"
STEPS = (4, 7)


def uneven(rank: int, poisoned: int = -1) -> dict[str, Any]:
    """Weights at the end, to the bit; which steps were judged and skipped; what was reported; the longest step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    longest = 0.0
    with watched(model, optimizer, RULES) as (gw, collector):
        for _epoch in range(2):
            with model.join():
                for step in range(STEPS[rank]):
                    started = time.monotonic()
                    optimizer.zero_grad()
                    loss = loss_of(model, batch(step, 0, rank))
                    (loss * (float("nan") if step == poisoned and rank == 1 else 1.0)).backward()
                    optimizer.step()
                    longest = max(longest, time.monotonic() - started)
        gw.flush()
        return {
            "weights": fingerprint([param.detach() for param in model.parameters()]),
            "finite": all(bool(param.isfinite().all()) for param in model.parameters()),
            "judged": len(collector.records),
            "skipped": [one.snapshot.step for one in collector.records if one.decision.skip],
            "errors": dict(gw.status()["internal_errors"]),
            "waited": longest >= process_group.WAIT_SECONDS / 2,
        }


SITUATIONS = {
    "healthy": uneven,
    "nan while both step": lambda rank: uneven(rank, poisoned=2),
    "nan after one has joined": lambda rank: uneven(rank, poisoned=5),
}
