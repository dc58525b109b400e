"""Two ranks over gloo on this machine: the launcher that tests call, and what its workers share.

Importing torch costs seconds, so ranks are forked from a process that has imported it (and run nothing of it), and
one launch runs many situations; each returns a dict that travels home as JSON.
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

WORLD = 2
SECONDS = 240
IMPORTED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "prometheus_client",
    "pydantic",
    "ruamel.yaml",
    "structlog",
)


def launch(module: str, chosen: str = "", world: int = WORLD) -> dict[str, list[Any]]:
    """Run every situation of a module on `world` ranks: its results by name, one per rank.

    Fails with the ranks' output when one of them did not come home.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(list(IMPORTED))
    with tempfile.TemporaryDirectory(prefix="gradwatch-ranks-") as folder:
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            forks.Process(target=main, args=(module, folder, chosen, world, rank, environ))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        try:
            deadline = time.monotonic() + SECONDS
            for rank in ranks:
                rank.join(max(deadline - time.monotonic(), 0))
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        codes = [rank.exitcode for rank in ranks]
        said = [path.read_text(errors="replace") for path in sorted(Path(folder).glob("*.log"))]
        assert codes == [0] * world, f"exit codes {codes}\n" + "\n".join(said)
        homes = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return {name: [home[name] for home in homes] for name in homes[0]}


def main(module: str, folder: str, chosen: str, world: int, rank: int, environ: dict[str, str]) -> None:
    """One rank: every situation in turn, a barrier between them; a situation that raises says so."""
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a rank that dies of a signal says where it was
    os.environ.clear()
    os.environ.update(environ)

    import torch
    import torch.distributed as dist

    from tests.golden.kept import FOLDER, kept, write

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
        with kept() as lines:
            try:
                results[name] = situation(rank)
            except Exception:
                results[name] = {"raised": traceback.format_exc()}
        if FOLDER in os.environ:
            write(Path(os.environ[FOLDER]), f"{name}, rank {rank}", lines)
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def fingerprint(tensors: Any) -> str:
    """A hash of every bit of some tensors (their local parts)."""
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        digest.update(local.contiguous().numpy().tobytes())
    return digest.hexdigest()
