"""What one watched training reports in each parallel mode, beside the same training in float64 in one process.

Every situation returns, per step, the norms reported on this rank and those of an independent computation: a
float64 copy of the model sees the batches of all ranks, its gradients are averaged, and no hook of ours is in
it.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.session.watch import session_of

WORLD = 2
STEPS = 5
CLIP = 0.05
AT_EACH_STEP = """
version: 1
extends: [default]
rules:
  rank-outlier: {every: 1}
  rank-mismatch: {every: 1}
"""

Batch = Callable[[int, int, int], Tensor]


class Collector:
    """A sink that keeps every Record."""

    name = "collector"

    def __init__(self) -> None:
        self.records: list[Record] = []

    def open(self, run: Any, health: Any = None) -> None: ...

    def write(self, record: Record) -> None:
        self.records.append(record)

    def flush(self, timeout: float) -> bool:
        return True

    def close(self) -> None: ...


class Net(nn.Module):
    """Two layers and a head; `reentrant` None = no checkpointing; the last may go unused."""

    def __init__(self, reentrant: bool | None = None, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 1)
        self.extra = nn.Linear(4, 4) if unused else None
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            hidden = self.b(torch.tanh(self.a(x)))
        else:
            hidden = self.b(checkpoint(lambda z: torch.tanh(self.a(z)), x, use_reentrant=self.reentrant))
        out: Tensor = self.c(torch.tanh(hidden))
        return out


def batch(step: int, micro: int, rank: int) -> Tensor:
    """float32[4, 6], another for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(4, 6, generator=generator) * (1 + rank)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def expected(model: nn.Module, step: int, micros: int, batch: Batch = batch) -> dict[str, float]:
    """Norms of the gradient averaged over ranks and summed over micro-batches, in float64."""
    model = copy.deepcopy(model).double()
    for param in model.parameters():
        param.grad = None
    world = dist.get_world_size()
    for rank in range(world):
        for micro in range(micros):
            (loss_of(model, batch(step, micro, rank).double().requires_grad_(True)) / world).backward()
    return {
        name: float(param.grad.norm()) for name, param in model.named_parameters() if param.grad is not None
    }


def local(model: nn.Module, step: int, rank: int, batch: Batch = batch) -> float:
    """The norm of all of one rank's own gradients, in float64."""
    model = copy.deepcopy(model).double()
    for param in model.parameters():
        param.grad = None
    loss_of(model, batch(step, 0, rank).double().requires_grad_(True)).backward()
    return (
        float(sum(param.grad.square().sum() for param in model.parameters() if param.grad is not None)) ** 0.5
    )


@contextlib.contextmanager
def watching(
    model: nn.Module, optimizer: Any, rules: str | RuleSet = "default", strict: bool = True
) -> Iterator[tuple[Any, Collector]]:
    """A strict watch: a fault of ours fails the situation."""
    collector = Collector()
    with tempfile.TemporaryDirectory() as folder:
        gw = gradwatch.watch(model, optimizer, rules=rules, sinks=[collector], run_dir=folder, strict=strict)
        try:
            yield gw, collector
        finally:
            gw.close()


def numbers(record: Record) -> dict[str, Any]:
    """What a Record says of the parameters that got a gradient."""
    snapshot = record.snapshot
    sites = [
        (name, k)
        for k, (name, kind) in enumerate(zip(snapshot.sites.names, snapshot.sites.kinds, strict=True))
        if kind == "param" and snapshot.calls[k] > 0
    ]
    return {
        "step": snapshot.step,
        "norm": {name: float(snapshot.norm[k]) for name, k in sites},
        "applied": {name: float(snapshot.norm[k] * snapshot.coef[k]) for name, k in sites},
        "total": snapshot.total_norm,
        "total_applied": snapshot.total_norm_applied,
        "micro": snapshot.micro,
        "numels": {name: int(snapshot.sites.numels[k]) for name, k in sites},
        "ndims": {name: int(snapshot.sites.ndims[k]) for name, k in sites},
    }


def ranks_of(record: Record, column: str) -> list[float]:
    """A column by rank."""
    found = record.snapshot.columns.get(column)
    return [] if found is None else found.values[found.present].tolist()


def trained(
    rank: int,
    wrap: Callable[[nn.Module], nn.Module],
    net: Callable[[], nn.Module] = Net,
    micros: int = 1,
    clip: Callable[[nn.Module], None] | None = None,
    batch: Batch = batch,
    held_back: bool = False,
) -> dict[str, Any]:
    """Train a wrapped model for a few steps under a watch, and a plain twin of it beside it."""
    twin = net()  # plain: takes the same steps by hand, in float64
    twin64 = copy.deepcopy(twin).double()
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    with watching(model, optimizer, parse_rules(AT_EACH_STEP)) as (gw, collector):
        for step in range(STEPS):
            wanted = expected(twin64, step, micros, batch)
            optimizer.zero_grad()
            for micro in range(micros):
                last = micro == micros - 1
                quiet = (
                    model.no_sync() if not last and hasattr(model, "no_sync") else contextlib.nullcontext()
                )
                if held_back:
                    cast(FSDPModule, model).set_requires_gradient_sync(last)
                with quiet:
                    x = batch(step, micro, rank)
                    loss_of(model, x.requires_grad_(True)).backward()
            if clip is not None:
                clip(model)
            optimizer.step()
            total = sum(norm * norm for norm in wanted.values()) ** 0.5
            factor = min(1.0, CLIP / total) if clip is not None else 1.0
            own = [local(twin64, step, each, batch) for each in range(dist.get_world_size())]
            told.append({"expected": wanted, "factor": factor, "local": own})
            _follow(twin64, step, micros, factor, batch)
        found = [numbers(record) for record in collector.records]
        columns = [ranks_of(record, "rank_norm") for record in collector.records]
        reached = session_of(gw).account().watched.backwards
        errors = gw.health.errors()
        return {"told": told, "found": found, "rank_norm": columns, "errors": errors, "reached": reached}


def _follow(model: nn.Module, step: int, micros: int, factor: float, batch: Batch) -> None:
    """The step that SGD takes, by hand, in float64."""
    for param in model.parameters():
        param.grad = None
    world = dist.get_world_size()
    for rank in range(world):
        for micro in range(micros):
            (loss_of(model, batch(step, micro, rank).double().requires_grad_(True)) / world).backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.1 * factor * param.grad


def clip_torch(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def clip_fsdp(model: Any) -> None:
    model.clip_grad_norm_(CLIP)


def ddp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in (model.a, model.b, model.c):
        fully_shard(layer)
    return fully_shard(model)


def hsdp2(model: nn.Module) -> nn.Module:
    """Replicated over both ranks, sharded over one: sums must not count a replica twice."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def fsdp1(original: bool) -> Callable[[nn.Module], nn.Module]:
    return lambda model: FullyShardedDataParallel(
        model, use_orig_params=original, device_id=torch.device("cpu")
    )


class Stage(nn.Module):
    """One stage of a pipeline."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def pipelined(rank: int, schedule: Any, per_rank: int = 1, named: bool = True) -> dict[str, Any]:
    """A pipeline of stages over the ranks; `named` = every stage has names of its own, as split models have.

    Where they have not, the parameters of the second rank are told apart by a number.
    """
    from torch.distributed.pipelining import PipelineStage

    micros, count = 4, WORLD * per_rank
    numbers_here = [rank + WORLD * k for k in range(per_rank)]
    stages = {number: Stage(number) for number in numbers_here}
    names = {number: f"stage{number}" if named else f"part{number // WORLD}" for number in range(count)}
    model = nn.ModuleDict({names[number]: stage for number, stage in stages.items()})
    placed = [PipelineStage(stage, n, count, torch.device("cpu")) for n, stage in stages.items()]
    runner = schedule(
        placed if per_rank > 1 else placed[0],
        n_microbatches=micros,
        loss_fn=lambda out, target: (out - target).square().sum(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    whole = nn.Sequential(*(Stage(number) for number in range(count))).double()
    told = []
    with watching(model, optimizer) as (gw, collector):
        for step in range(STEPS):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            whole.zero_grad()
            (whole(x.double()).square().sum() / micros).backward()
            wanted = {
                f"{names[int(number)]}.{name}" + ("@1" if not named and int(number) % WORLD else ""): float(
                    param.grad.norm()
                )
                for number, stage in whole.named_children()
                for name, param in stage.named_parameters()
            }
            optimizer.zero_grad()
            runner.step(x) if rank == 0 else runner.step(target=torch.zeros(8, 4))
            optimizer.step()
            with torch.no_grad():
                for param in whole.parameters():
                    param -= 0.01 * param.grad
            told.append({"expected": wanted, "factor": 1.0, "local": []})
        found = [numbers(record) for record in collector.records]
        return {"told": told, "found": found, "rank_norm": [[]], "errors": gw.health.errors()}


def schedule(name: str) -> Any:
    import torch.distributed.pipelining as pipelining

    return getattr(pipelining, name)


NORMS: dict[str, Callable[[int], Any]] = {
    "ddp": lambda rank: trained(rank, ddp()),
    "ddp clipped": lambda rank: trained(rank, ddp(), clip=clip_torch),
    "ddp bucket view": lambda rank: trained(rank, ddp(gradient_as_bucket_view=True)),
    "ddp static graph": lambda rank: trained(rank, ddp(static_graph=True)),
    "ddp find_unused": lambda rank: trained(
        rank, ddp(find_unused_parameters=True), net=lambda: Net(unused=True)
    ),
    "ddp no_sync": lambda rank: trained(rank, ddp(), micros=3),
    "ddp no_sync clipped": lambda rank: trained(rank, ddp(), micros=3, clip=clip_torch),
    "ddp checkpoint": lambda rank: trained(rank, ddp(), net=lambda: Net(reentrant=False), clip=clip_torch),
    "ddp reentrant checkpoint": lambda rank: trained(
        rank, ddp(static_graph=True), net=lambda: Net(reentrant=True), clip=clip_torch
    ),
    "fsdp2": lambda rank: trained(rank, fsdp2),
    "fsdp2 clipped": lambda rank: trained(rank, fsdp2, clip=clip_torch),
    "fsdp2 accumulated": lambda rank: trained(rank, fsdp2, micros=2, clip=clip_torch),
    "fsdp2 held back": lambda rank: trained(rank, fsdp2, micros=3, clip=clip_torch, held_back=True),
    "hsdp2": lambda rank: trained(rank, hsdp2, clip=clip_torch),
    "fsdp1 original": lambda rank: trained(rank, fsdp1(True), clip=clip_fsdp),
    "pipeline gpipe": lambda rank: pipelined(rank, schedule("ScheduleGPipe")),
    "pipeline 1f1b": lambda rank: pipelined(rank, schedule("Schedule1F1B")),
    "pipeline zero bubble": lambda rank: pipelined(
        rank, schedule("ScheduleInterleavedZeroBubble"), per_rank=2
    ),
    "pipeline same names": lambda rank: pipelined(rank, schedule("ScheduleGPipe"), named=False),
    "fsdp1 flat": lambda rank: trained(rank, fsdp1(False), clip=clip_fsdp),
}

OF_PARTS = """version: 1
rules:
  whole: {detect: {kind: above, of: weight_norm, threshold: 1e9}, every: 1}
  parts: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 1}
"""


def columns_of_shards(rank: int) -> Mapping[str, str]:
    """The rules without data under FSDP2: one column can be made of shards, the other cannot."""
    model = fsdp2(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, optimizer, parse_rules(OF_PARTS)) as (gw, _):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(step, 0, rank)).backward()
            optimizer.step()
        return session_of(gw).account().no_data


SITUATIONS: dict[str, Callable[[int], Any]] = {**NORMS, "columns of shards": columns_of_shards}
