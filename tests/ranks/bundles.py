"""Two ranks in one run folder, a NaN in rank 1's batch only: each keeps a bundle of what it had itself."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwatch
from gradwatch.incidents.bundle.bundle_reader import read_document, read_tensors
from gradwatch.localise.replay.bundle_replay import Rerun
from gradwatch.rules.files import parse_rules
from tests.ranks.situations import Net, batch, fsdp2, loss_of
from tests.ranks.trials import made, weights

RULES = """
version: 1
rules:
  nan: {detect: {kind: nonfinite}, do: [skip_step, localise, snapshot: {batch: true, parameters: true}]}
"""


def shared_folder(rank: int) -> Path:
    """One folder for all ranks."""
    told = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])


def kept(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Train eight steps, the fifth with a NaN on rank 1; what this rank kept, and what a replay says of it."""
    folder = shared_folder(rank)
    _, model, optimizer = made(wrap)
    at_step: dict[str, torch.Tensor] | None = None
    with gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[], run_dir=folder, run_id="job", strict=True
    ) as gw:
        for step in range(8):
            given = batch(step, 0, rank)
            if step == 4 and rank == 1:
                given[0, 0] = torch.nan
            if step == 4 and wrap is fsdp2:  # a checkpoint of the whole model, as anybody would have it
                at_step = {name: param.full_tensor().detach() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
            optimizer.zero_grad()
            loss_of(model, given).backward()
            optimizer.step()
        gw.flush(30)
    dist.barrier()
    names = sorted(path.name for path in (folder / "job" / "bundles").iterdir())
    own = folder / "job" / "bundles" / f"nan-0-4-rank{rank}"
    document, tensors = read_document(own), read_tensors(own)
    found: dict[str, Any] = {
        "names": names,
        "rank": [document.incident.rank, document.incident.world_size],
        "obstacle": document.obstacle,
        "left_out": list(map(str, document.left_out)),
        "errors": gw.health.errors(),
        "weights": weights(model),
        "gradients": {name: list(tensors[stored].shape) for name, stored in document.gradients.items()},
        "local": {
            name: list(getattr(param, "_local_tensor", param).shape)
            for name, param in model.named_parameters()
        },
    }
    if not document.obstacle:
        found["inputs"] = sum(
            tensor.isnan().any().item() for name, tensor in tensors.items() if "input." in name
        )
        once = Rerun(document, tensors, [Net()])
        once.load(at_step)
        replayed = once.run(1 << 30)
        found["cause"], found["note"] = replayed.phase, replayed.note
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return found


SITUATIONS: dict[str, Callable[[int], Any]] = {
    "ddp": lambda rank: kept(rank, DistributedDataParallel),
    "fsdp2": lambda rank: kept(rank, fsdp2),
}
