"""Whether parts of the job are compiled: a hook that comes or goes then has them compiled anew."""

from __future__ import annotations

import sys


def anything_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    # With `fullgraph=True` dynamo counts graphs and no frames.
    return dynamo is not None and any(dynamo.counters.get(name) for name in ("frames", "stats"))
