"""Rank and run of this process, where torch.distributed knows better than the environment."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from gradwatch.distributed.process_group import default_store
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.interruption import not_ours

WAIT_SECONDS = 10.0
"""How long a rank waits, once, for rank 0 to name the run; ranks of one training attach together."""

_named = itertools.count()


def placed(run: RunInfo, named: bool) -> RunInfo:
    """The run as the rank it is: Lightning's own launcher, for one, sets no RANK as torchrun does.

    Where the run is not `named`, all ranks take the id that rank 0 made up, so that they share a folder.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return run
    run = replace(run, rank=dist.get_rank(), world_size=dist.get_world_size())
    if run.world_size > 1:
        run = replace(run, told_by=0, launch="")
    if named or run.world_size == 1:
        return run
    run_id = _agreed(run.rank, run.run_id)
    return replace(run, run_id=run_id, directory=os.path.join(os.path.dirname(run.directory), run_id))


def _agreed(rank: int, made_up: str) -> str:
    """Rank 0's id, through the store of the process group; no collective, so no rank can hang another.

    This rank's own where rank 0 does not watch, or torch no longer shows its store.
    """
    try:
        key = f"gradwatch/run-id/{next(_named)}"
        store = default_store()
        if rank == 0:
            store.set(key, made_up)
            return made_up
        store.wait([key], timedelta(seconds=WAIT_SECONDS))
        return str(store.get(key).decode()) or made_up
    except Exception as error:
        if not_ours(error):
            raise
        return made_up
