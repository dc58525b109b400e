"""Parameters cut over device meshes: hybrid sharding, tensor parallelism, offloading, pipelines of sharded stages.

`TWO` run on two ranks, `FOUR` on four (two by two). Each compares with a plain twin in float64, as the others do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gradwatch.rules.files import parse_rules
from tests.ranks.situations import (
    STEPS,
    Net,
    Stage,
    batch,
    clip_fsdp,
    clip_torch,
    fsdp1,
    loss_of,
    numbers,
    trained,
    watching,
)

ON_LOCAL = "version: 1\nrules:\n  far: {detect: {kind: above, of: norm_local, threshold: 1e9}}\n"


def mesh_of(*shape: int) -> Any:
    names = ("replicate", "shard") if len(shape) == 2 else ("tp",)
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


def same_batch(step: int, micro: int, rank: int) -> Tensor:
    """Ranks of one tensor-parallel group see the same rows."""
    return batch(step, micro, 0)


class Even(Net):
    """Layers that two ranks can halve, as tensor parallelism wants them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 2)


# -- two ranks -------------------------------------------------------------------------------------------


def tensor_parallel(model: nn.Module, mesh: Any = None) -> nn.Module:
    """`a` by columns, `b` by rows (its bias is replicated), the head a plain tensor on every rank."""
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    return parallelize_module(model, mesh_of(2) if mesh is None else mesh, plan)


class Sequence(nn.Module):
    """Embedding, norm, two layers, a head; the norm works on a part of the sequence under SequenceParallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(10, 6)
        self.norm = nn.LayerNorm(6)
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(torch.tanh(self.a(self.norm(self.embed(x))))))
        return out


def tokens(step: int) -> Tensor:
    return torch.randint(0, 10, (2, 4), generator=torch.Generator().manual_seed(step))


def sequence_parallel(rank: int, norm: bool) -> dict[str, Any]:
    """An embedding whose gradient is whole on every rank; with `norm` also gradients nobody has summed up."""
    twin, model, mesh = Sequence().double(), Sequence(), mesh_of(2)
    plan: dict[str, Any] = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    plan["embed"] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1) if norm else Replicate()
    )
    if norm:
        plan["norm"] = SequenceParallel()
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(model.a, mesh, whole)
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told, provisional = [], []
    with watching(model, optimizer, strict=False) as (gw, collector):  # what cannot be measured is an error
        for step in range(STEPS):
            twin.zero_grad()
            twin(tokens(step)).square().mean().backward()
            wanted = {name: float(param.grad.norm()) for name, param in twin.named_parameters()}
            with torch.no_grad():
                for param in twin.parameters():
                    param -= 0.1 * param.grad
            optimizer.zero_grad()
            model(tokens(step)).square().mean().backward()
            optimizer.step()
            told.append({"expected": wanted, "factor": 1.0, "local": []})
        found = [numbers(record) for record in collector.records]
        provisional = [record.snapshot.provisional for record in collector.records]
        errors = gw.health.errors()
    return {"told": told, "found": found, "provisional": provisional, "errors": errors}


def offloading(model: nn.Module) -> nn.Module:
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in (model.a, model.b, model.c):
        fully_shard(layer, offload_policy=policy)
    return fully_shard(model, offload_policy=policy)


def offloaded(rank: int, **options: Any) -> dict[str, Any]:
    """No hook of ours stands on a parameter, which would keep FSDP2 from overlapping its copies."""
    hooks: list[int] = []

    def clip(model: nn.Module) -> None:
        clip_torch(model)
        hooks.append(sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()))

    return {**trained(rank, offloading, clip=clip, **options), "hooks": sum(hooks)}


def local_under_fsdp1(rank: int, original: bool) -> dict[str, Any]:
    """A slice of a flat parameter never hears of its own gradient: no local norm, rather than a wrong one."""
    model = fsdp1(original)(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, optimizer, parse_rules(ON_LOCAL)) as (gw, collector):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(step, 0, rank)).backward()
            optimizer.step()
        columns = [record.snapshot.column("norm_local") for record in collector.records]
        return {
            "present": [column is not None and bool(column.present.any()) for column in columns],
            "errors": gw.health.errors(),
        }


# -- four ranks ------------------------------------------------------------------------------------------


def hybrid1(original: bool, strategy: ShardingStrategy) -> Callable[[nn.Module], nn.Module]:
    return lambda model: FullyShardedDataParallel(
        model,
        device_mesh=mesh_of(2, 2),
        sharding_strategy=strategy,
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )


def hybrid2(model: nn.Module) -> nn.Module:
    mesh = mesh_of(2, 2)
    for layer in (model.a, model.b, model.c):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel_sharded(model: nn.Module) -> nn.Module:
    """FSDP2 over the first dimension of the mesh, tensor parallelism over the second."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def by_pair(step: int, micro: int, rank: int) -> Tensor:
    """Another batch for every pair of ranks that are one tensor-parallel group."""
    return batch(step, micro, rank // 2)


def pipeline(rank: int, schedule: str, width: int = 2, alike: bool = False) -> dict[str, Any]:
    """Two stages, each sharded over `width` ranks (1: held whole); `alike`: their parameters have equal names."""
    import torch.distributed.pipelining as pipelining

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, width), mesh_dim_names=("pp", "dp"))
    number, micros = mesh["pp"].get_local_rank(), 2
    stage: nn.Module = Stage(number)
    if width > 1:
        stage = fully_shard(stage, mesh=mesh["dp"])
    model = nn.ModuleDict({"stage" if alike else f"stage{number}": stage})
    placed = pipelining.PipelineStage(stage, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    runner = getattr(pipelining, schedule)(
        placed, n_microbatches=micros, loss_fn=lambda out, target: (out - target).square().sum()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    whole = nn.Sequential(Stage(0), Stage(1)).double()
    told = []
    with watching(model, optimizer) as (gw, collector):
        for step in range(STEPS):
            xs = [
                torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + dp))
                for dp in range(width)
            ]
            whole.zero_grad()
            for x in xs:
                (whole(x.double()).square().sum() / micros / width).backward()
            wanted = {
                (f"stage.{name}{'@1' * k}" if alike else f"stage{k}.{name}"): float(param.grad.norm())
                for k, stage in enumerate(whole)
                for name, param in stage.named_parameters()
            }
            optimizer.zero_grad()
            own = xs[mesh["dp"].get_local_rank()]
            runner.step(own) if number == 0 else runner.step(target=torch.zeros(8, 4))
            optimizer.step()
            with torch.no_grad():
                for param in whole.parameters():
                    param -= 0.01 * param.grad
            told.append({"expected": wanted, "factor": 1.0, "local": []})
        found = [numbers(record) for record in collector.records]
        return {"told": told, "found": found, "errors": gw.health.errors()}


TWO: dict[str, Callable[[int], Any]] = {
    "tensor parallel": lambda rank: trained(rank, tensor_parallel, net=Even, batch=same_batch),
    "tensor parallel accumulated": lambda rank: trained(
        rank, tensor_parallel, net=Even, batch=same_batch, micros=2
    ),
    "embedding parallel": lambda rank: sequence_parallel(rank, norm=False),
    "fsdp2 offloaded": offloaded,
    "fsdp2 offloaded accumulated": lambda rank: offloaded(rank, micros=2),
    "pipeline of equal names": lambda rank: pipeline(rank, "ScheduleGPipe", width=1, alike=True),
    "fsdp1 original accumulated": lambda rank: trained(rank, fsdp1(True), micros=2),
    "fsdp1 flat accumulated": lambda rank: trained(rank, fsdp1(False), micros=2),
}
FOUR: dict[str, Callable[[int], Any]] = {
    "fsdp1 hybrid": lambda rank: trained(rank, hybrid1(True, ShardingStrategy.HYBRID_SHARD), clip=clip_fsdp),
    "fsdp1 hybrid flat": lambda rank: trained(rank, hybrid1(False, ShardingStrategy.HYBRID_SHARD)),
    "fsdp1 hybrid grad_op": lambda rank: trained(rank, hybrid1(True, ShardingStrategy._HYBRID_SHARD_ZERO2)),
    "fsdp2 hybrid": lambda rank: trained(rank, hybrid2, clip=clip_torch),
    "fsdp2 tensor parallel": lambda rank: trained(rank, tensor_parallel_sharded, net=Even, batch=by_pair),
    "fsdp2 pipeline gpipe": lambda rank: pipeline(rank, "ScheduleGPipe"),
    "fsdp2 pipeline 1f1b": lambda rank: pipeline(rank, "Schedule1F1B"),
    "fsdp2 pipeline of equal names": lambda rank: pipeline(rank, "Schedule1F1B", alike=True),
}
OTHERS: dict[str, Callable[[int], Any]] = {
    "sequence parallel": lambda rank: sequence_parallel(rank, norm=True),
    "local original": lambda rank: local_under_fsdp1(rank, True),
    "local flat": lambda rank: local_under_fsdp1(rank, False),
}


def __getattr__(name: str) -> Any:
    if name == "SITUATIONS":  # by how many ranks there are
        return FOUR if dist.get_world_size() == 4 else {**TWO, **OTHERS}
    raise AttributeError(name)
