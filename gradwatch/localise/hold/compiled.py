"""Whether parts of the job are compiled: a hook that comes or goes then has them compiled anew."""

from __future__ import annotations

import sys

from torch import nn


def anything_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    # With `fullgraph=True` dynamo counts graphs and no frames.
    return dynamo is not None and any(dynamo.counters.get(name) for name in ("frames", "stats"))


def compiles(module: nn.Module) -> bool:
    """Whether this module, as it is called, runs compiled: nobody hears the calls of its parts."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
