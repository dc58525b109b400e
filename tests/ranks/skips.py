"""Two ranks: skipped steps hashed before and after; acting inside the backward, refused or insisted on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwatch
from gradwatch.errors import AttachError
from gradwatch.rules.files import parse_rules
from tests.ranks.launch import fingerprint
from tests.ranks.situations import Net, batch, fsdp2, loss_of
from tests.ranks.trials import watched

SKIPS = "version: 1\nrules:\n  non-finite: {detect: {kind: nonfinite}, do: [skip_step]}\n"
BOUNDS = (
    "version: 1\nrules:\n  far:\n    detect: {kind: above, of: norm, threshold: 1e-3}\n"
    "    do: [clip: {to: 1e-3, at: backward%s}]\n"
)
INJURED = {0, 3, 4}


def local(tensor: Any) -> torch.Tensor:
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard.detach()


def digest(model: nn.Module, optimizer: Any) -> str:
    """This rank's part of the parameters and of the optimizer state, to the bit."""
    state = getattr(optimizer, "optim", optimizer).state
    tensors = [
        value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)
    ]
    return fingerprint([local(tensor) for tensor in (*model.parameters(), *tensors)])


def skipped(rank: int, wrap: Callable[[nn.Module], nn.Module], make: Callable[..., Any]) -> dict[str, Any]:
    """NaN in the batch of rank 1 now and then; whether anything moved, step by step."""
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = make(model.parameters())
    moved, back = [], []
    with watched(model, optimizer, SKIPS) as (gw, collector):
        for step in range(6):
            optimizer.zero_grad()
            x = batch(step, 0, rank) * (float("nan") if rank == 1 and step in INJURED else 1.0)
            loss_of(model, x).backward()
            before = digest(model, optimizer)
            optimizer.step()
            moved.append(digest(model, optimizer) != before)
            back.append(all(param.grad is not None for param in model.parameters()))
        return {
            "moved": moved,
            "back": all(back),
            "errors": gw.health.errors(),
            "steps": len(collector.records),
        }


def refused(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """`at: backward` and `drop_micro` without and with `local: true`."""
    said = []
    drops = "version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [drop_micro]}}"
    for text in (BOUNDS % "", drops):
        model = wrap(Net())
        try:
            gradwatch.watch(model, rules=parse_rules(text), sinks=[]).close()
            said.append("")
        except AttachError as error:
            said.append(str(error))
    return {"said": said}


def insisted(rank: int) -> dict[str, Any]:
    """DDP with `local: true`: every rank bounds what it has before the reduction, and the weights stay alike."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    rules = parse_rules(BOUNDS % ", local: true")
    with tempfile.TemporaryDirectory() as folder:
        gw = gradwatch.watch(model, optimizer, rules=rules, sinks=[], run_dir=folder, strict=True)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(step, 0, rank)).backward()
            norms += [float(param.grad.norm()) for param in model.parameters() if param.grad is not None]
            optimizer.step()
        errors = gw.health.errors()
        gw.close()
    return {"largest": max(norms), "hash": fingerprint(model.parameters()), "errors": errors}


def adamw(**options: Any) -> Callable[..., Any]:
    return lambda params: torch.optim.AdamW(params, lr=0.01, **options)


def zero(params: Any) -> Any:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)


SITUATIONS: dict[str, Callable[[int], Any]] = {
    "skip fsdp2": lambda rank: skipped(rank, fsdp2, adamw()),
    "skip fsdp2 foreach": lambda rank: skipped(rank, fsdp2, adamw(foreach=True)),
    "skip fsdp2 fused": lambda rank: skipped(rank, fsdp2, adamw(fused=True)),
    "skip fsdp2 sgd": lambda rank: skipped(rank, fsdp2, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "skip ddp fused": lambda rank: skipped(rank, DistributedDataParallel, adamw(fused=True)),
    "skip zero": lambda rank: skipped(rank, DistributedDataParallel, zero),
    "refused ddp": lambda rank: refused(rank, DistributedDataParallel),
    "refused fsdp2": lambda rank: refused(rank, fsdp2),
    "insisted ddp": insisted,
}
