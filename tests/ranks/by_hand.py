"""Two ranks that average their gradients themselves, through `.data` or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.launch import fingerprint
from tests.ranks.situations import Net, batch, loss_of
from tests.ranks.trials import watched

SKIPS = "version: 1\nrules:\n  non-finite: {detect: {kind: nonfinite}, do: [skip_step]}\n"
CLIPS = "version: 1\nclip: {total: {method: norm, max_norm: 0.05}}\n"


def averaged(rank: int, text: str, through_data: bool, poisoned: int = -1) -> dict[str, Any]:
    """Weights at the end, to the bit; which steps were skipped; the largest total the optimizer was given."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    largest = 0.0
    with watched(model, optimizer, text) as (gw, collector):
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, 0, rank))
            (loss * (float("nan") if step == poisoned and rank == 1 else 1.0)).backward()
            for param in model.parameters():
                assert param.grad is not None
                grad = param.grad.data if through_data else param.grad
                dist.all_reduce(grad)
                grad /= 2
            optimizer.step()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            total = float(torch.nn.utils.get_total_norm(grads))
            largest = max(largest, total) if total == total else largest
        gw.flush()
        return {
            "weights": fingerprint([param.detach() for param in model.parameters()]),
            "finite": all(bool(param.isfinite().all()) for param in model.parameters()),
            "skipped": [one.snapshot.step for one in collector.records if one.decision.skip],
            "largest": largest,
            "errors": dict(gw.status()["internal_errors"]),
        }


SITUATIONS = {
    "nan data": lambda rank: averaged(rank, SKIPS, True, poisoned=3),
    "nan grad": lambda rank: averaged(rank, SKIPS, False, poisoned=3),
    "clip data": lambda rank: averaged(rank, CLIPS, True),
    "clip grad": lambda rank: averaged(rank, CLIPS, False),
}
