"""Which rank this is, where torch.distributed knows better than the environment."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from gradwatch.snapshot import RunInfo


def placed(run: RunInfo) -> RunInfo:
    """The run as the rank it is: Lightning's own launcher, for one, sets no RANK as torchrun does."""
    if dist.is_available() and dist.is_initialized():
        return replace(run, rank=dist.get_rank(), world_size=dist.get_world_size())
    return run
