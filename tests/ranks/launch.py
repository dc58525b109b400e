"""Two ranks over gloo on this machine: the launcher that tests call, and what its workers share.

The ranks are forked from a Python that has imported torch. One launch runs many situations; each returns a dict that
travels home as JSON.
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import warm

WORLD = 2
SECONDS = 240
FEW, ALL = 20, 100
"""Faults of one kind that a rank is given: few in every run of the tests, all of them in a soak."""
TRIALS = int(os.environ.get("TRIALS", FEW))


def launch(module: str, chosen: str = "", world: int = WORLD, trials: int = FEW) -> dict[str, list[Any]]:
    """Run every situation of a module on `world` ranks: its results by name, one per rank.

    Fails with the ranks' output when one of them did not come home, or a situation raised.
    """
    with tempfile.TemporaryDirectory(prefix="gradwatch-ranks-") as folder:
        command = [sys.executable, "-m", "tests.ranks.launch", module, folder, chosen, str(world)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TRIALS": str(trials)}
        ranks = [warm.Process([*command, str(rank)], warm.ROOT, environ) for rank in range(world)]
        try:
            ended = [rank.communicate(SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        codes = [status for status, _, _ in ended]
        said = "\n".join(out + err for _, out, err in ended)
        assert codes == [0] * world, f"exit codes {codes}\n{said}"
        homes = [
            json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)
        ]
    raised = [
        f"{name}, rank {rank}\n{found['raised']}"
        for rank, home in enumerate(homes)
        for name, found in home.items()
        if "raised" in found
    ]
    assert not raised, "\n".join(raised)
    return {name: [home[name] for home in homes] for name in homes[0]}


def main(module: str, folder: str, chosen: str, world: int, rank: int) -> None:
    """One rank: every situation in turn, a barrier between them; a situation that raises says so."""
    import torch
    import torch.distributed as dist

    from tests.golden.kept import FOLDER, kept, write

    faulthandler.enable()  # a rank that dies of a signal says where it was
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    results: dict[str, Any] = {}
    for name, situation in importlib.import_module(module).SITUATIONS.items():
        if chosen and chosen not in name:
            continue
        torch.manual_seed(0)
        if FOLDER in os.environ:
            with kept() as lines:
                results[name] = outcome(situation, rank)
            write(Path(os.environ[FOLDER]), f"{name}, rank {rank}", lines)
        else:
            results[name] = outcome(situation, rank)
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def outcome(situation: Callable[[int], Any], rank: int) -> Any:
    """What a situation returned; its traceback where it raised."""
    try:
        return situation(rank)
    except Exception:
        return {"raised": traceback.format_exc()}


def fingerprint(tensors: Any) -> str:
    """A hash of every bit of some tensors (their local parts)."""
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        digest.update(local.contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))
