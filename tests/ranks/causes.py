"""Two ranks of which one has a NaN: both tell the same cause, with the rank it is of, and train as without us."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwatch.localise.replay import cause_among_ranks, diagnosed_replay
from gradwatch.localise.sharded import whole_parameters
from tests.ranks.launch import fingerprint
from tests.ranks.trials import watched, weights

FAULTY = 1  # the rank
SEEN: list[str] = []  # hashes of what every forward gave, a replayed one's among them
AT = 4
STEPS = 6
Wrap = Callable[[nn.Module], nn.Module]


class Unit(nn.Module):
    """A vector scaled to length one; NaN for zeros."""

    def forward(self, h: Tensor) -> Tensor:
        """Length one."""
        return h / h.square().sum(-1, keepdim=True).sqrt()  # fault


class Net(nn.Module):
    """Two layers, dropout, a count of its own in a buffer, and the fault."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.head = nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False), nn.Linear(4, 1)
        self.unit, self.drop = Unit(), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        """The zeros of a batch stay zeros up to the fault."""
        self.calls += 1
        h = checkpoint(self.b, self.a(x), use_reentrant=False)
        out = self.drop(self.head(self.unit(h)))
        SEEN.append(fingerprint([out.detach().float()]))
        return out


def spread(model: nn.Module, **how: Any) -> nn.Module:
    """FSDP2, layer by layer."""
    for layer in (model.a, model.b, model.head):
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def block_and_root(model: nn.Module) -> nn.Module:
    """FSDP2 of one block and of the root, which takes the parameters of the other layers."""
    fully_shard(model.b)
    return fully_shard(model)


def mixed(model: nn.Module) -> nn.Module:
    """FSDP2 computing in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    return spread(model, mp_policy=policy)


def hybrid(model: nn.Module) -> nn.Module:
    """Replicated over both ranks, each holding all of it."""
    return spread(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")))


def whole_flat(model: nn.Module) -> nn.Module:
    """FSDP1."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def blocks_flat(model: nn.Module) -> nn.Module:
    """FSDP1 of two layers and of the root, computing in bfloat16."""
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    how = {"device_id": torch.device("cpu"), "use_orig_params": True, "mixed_precision": policy}
    model.a, model.head = (FullyShardedDataParallel(one, **how) for one in (model.a, model.head))
    return FullyShardedDataParallel(model, **how)


def flattened(model: nn.Module) -> nn.Module:
    """FSDP1 that leaves no original parameters."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def parallel(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Tensor parallelism of two layers: one divides its inputs, the other its outputs."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,)) if mesh is None else mesh
    divided = {
        "a": RowwiseParallel(input_layouts=Replicate()),
        "b": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, divided)


def parallel_counting(model: nn.Module) -> nn.Module:
    """The same, in a model that counts on its rank's part of a layer."""

    def scaled(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * len(getattr(model.b.weight, "_local_tensor", model.b.weight))

    model.head.register_forward_hook(scaled)
    return parallel(model)


def parallel_sharded(model: nn.Module) -> nn.Module:
    """The same, and sharded by FSDP2 as well."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(parallel(model, mesh["tensor"]), mesh=mesh["data"])


def batch(step: int, rank: int, broken: bool = True) -> Tensor:
    """float32[4, 6]; at one step one sample of one rank is nothing but zeros."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 6, generator=generator)
    if broken and step == AT and rank == FAULTY:
        x[2] = 0
    return x


class Plain(Net):
    """The same without the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Tanh()


def train(model: nn.Module, optimizer: Any, rank: int, by_hand: bool, in_loss: bool = False) -> list[Any]:
    """Hashes of the weights after every step; by hand: the broken step is left out. `in_loss`: the loss is a root."""
    torch.manual_seed(7 + rank)
    hashes = []
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(batch(step, rank)).squeeze(1)
        goal = out.detach() if in_loss and step == AT and rank == FAULTY else torch.zeros(())
        loss = (out - goal).square().mean()
        if in_loss:
            loss = loss.sqrt()  # in the loss
        loss.backward()
        if not (by_hand and step == AT):
            optimizer.step()
        hashes.append([weights(model), float(torch.rand(()))])
    return hashes


def told(
    wrap: Wrap,
    text: str = "",
    broken: Callable[[int], None] | None = None,
    alike: bool = False,
    in_loss: bool = False,
) -> Callable[[int], Any]:
    """A situation: what was found on this rank, and that nobody else noticed; `alike`: ranks get the same batches.

    `in_loss`: the fault is in the loop.
    """

    def situation(rank: int) -> dict[str, Any]:
        SEEN.clear()
        rank = FAULTY if alike else rank
        kind = Plain if in_loss else Net
        bare = wrap(kind())
        expected = train(bare, torch.optim.AdamW(bare.parameters(), 0.01), rank, True, in_loss)
        model = wrap(kind())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if broken is not None:
            broken(rank)
        with watched(model, optimizer, text, strict=broken is None) as (gw, collector):
            hashes = train(model, optimizer, rank, False, in_loss)
            errors = gw.health.errors()
        diagnosed_replay.replay, whole_parameters.HOST_BYTES = REPLAY, HOST_BYTES
        bits = SEEN[STEPS:]
        findings = [one for record in collector.records for one in record.findings]
        return {
            "same": hashes == expected,
            "exact": [bits[AT + 1] == bits[AT]] if len(bits) > STEPS else [],
            "found": [(one.phase, one.op, one.module, one.where, one.rank, one.step) for one in findings],
            "notes": [one.note for one in findings],
            "by": [one.by for one in findings],
            "samples": [list(one.samples) for one in findings],
            "deterministic": [one.deterministic for one in findings],
            "errors": errors,
        }

    return situation


class Deep(nn.Module):
    """Two layers without dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.head = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A number for each row."""
        out: Tensor = self.head(torch.relu(self.b(torch.relu(self.a(x)))))
        return out


LARGE = """
version: 1
rules:
  large: {detect: {kind: above, of: total_norm, threshold: 1000}, do: [localise: {by: replay}]}
"""


def rows(wrap: Wrap, broken: Callable[[int], None] | None = None) -> Callable[[int], Any]:
    """A situation: one row of one rank's batch carries a gradient that is finite and far too large."""

    def situation(rank: int) -> dict[str, Any]:
        model = wrap(Deep())
        optimizer = torch.optim.SGD(model.parameters(), 1e-9)
        if broken is not None:
            broken(rank)
        with watched(model, optimizer, LARGE) as (gw, collector):
            for step in range(STEPS):
                optimizer.zero_grad()
                goal = torch.zeros(4, 1)
                goal[1] = 1e5 if step == AT and rank == FAULTY else 0
                (model(batch(step, rank, broken=False)) - goal).square().mean().backward()
                optimizer.step()
            errors = gw.health.errors()
        diagnosed_replay.gradients_to_gather = TO_GATHER
        findings = [one for record in collector.records for one in record.findings]
        return {"found": [(one.rank, one.step, list(one.samples)) for one in findings], "errors": errors}

    return situation


OWN_LOSS = """
version: 1
extends: [default]
rules:
  loss-non-finite: {do: [localise: {by: replay}]}
"""


def own_loss(text: str = "") -> Callable[[int], Any]:
    """A situation: the loss of one rank is NaN, its gradients are finite, and no other rank knows of it."""

    def situation(rank: int) -> dict[str, Any]:
        model = DistributedDataParallel(Deep())
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        met: list[str] = []

        def meet(name: str, *rest: Any) -> Any:
            met.append(name)
            return MEET(name, *rest)

        cause_among_ranks.meet = meet
        with watched(model, optimizer, text) as (gw, collector):
            for step in range(STEPS):
                optimizer.zero_grad()
                goal = torch.zeros(4, 1)
                if step == AT and rank == FAULTY:
                    goal[1] = torch.nan
                nn.functional.l1_loss(model(batch(step, rank, broken=False)), goal).backward()
                optimizer.step()
            errors = gw.health.errors()
        cause_among_ranks.meet = MEET
        findings = [one for record in collector.records for one in record.findings]
        return {
            "found": [(one.rule, one.rank, one.step, one.found) for one in findings],
            "met": met,
            "errors": errors,
        }

    return situation


MEET = cause_among_ranks.meet
TO_GATHER = diagnosed_replay.gradients_to_gather


def has_no_gradients(rank: int) -> None:
    """One rank has no room for whole gradients."""
    if rank == FAULTY:
        diagnosed_replay.gradients_to_gather = lambda model: []


REPLAY, HOST_BYTES = diagnosed_replay.replay, whole_parameters.HOST_BYTES


def fails_on_one(rank: int) -> None:
    """The replay of the rank at fault raises."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("ours")

    if rank == FAULTY:
        diagnosed_replay.replay = fail


def has_no_room(rank: int) -> None:
    """One rank cannot hold the whole parameters."""
    whole_parameters.HOST_BYTES = 8 if rank == FAULTY else 4 << 30


def line(of: Any = Unit, mark: str = "# fault") -> int:
    """Where the fault stands."""
    lines, first = inspect.getsourcelines(of)
    return first + next(n for n, text in enumerate(lines) if mark in text)


TOLD = {
    "ddp": told(DistributedDataParallel),
    "ddp with a replay that fails": told(DistributedDataParallel, broken=fails_on_one),
    "fsdp2": told(spread),
    "fsdp2 block and root": told(block_and_root),
    "fsdp2 mixed": told(mixed),
    "fsdp2 hybrid": told(hybrid),
    "fsdp2 with a replay that fails": told(spread, broken=fails_on_one),
    "fsdp1": told(whole_flat),
    "fsdp1 blocks, mixed": told(blocks_flat),
    "fsdp1 flattened": told(flattened),
    "fsdp1 with a replay that fails": told(whole_flat, broken=fails_on_one),
    "ddp, in the loss": told(DistributedDataParallel, in_loss=True),
    "fsdp1, in the loss": told(whole_flat, in_loss=True),
    "fsdp2, in the loss": told(spread, in_loss=True),
    "tensor parallel": told(parallel, alike=True),
    "tensor parallel, sharded": told(parallel_sharded, alike=True),
    "tensor parallel, counting": told(parallel_counting, alike=True),
    "fsdp2 without room": told(spread, broken=has_no_room),
}
ROWS = {
    "rows, ddp": rows(DistributedDataParallel),
    "rows, fsdp2": rows(spread),
    "rows, fsdp2 hybrid": rows(hybrid),
    "rows, fsdp1 blocks": rows(blocks_flat),
    "rows, fsdp2, gradients of one rank only": rows(spread, broken=has_no_gradients),
}
OWN = {"own loss": own_loss(), "own loss, whose rule searches": own_loss(OWN_LOSS)}
SITUATIONS = TOLD | ROWS | OWN
