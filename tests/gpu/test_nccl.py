"""One rank with NCCL: DDP and FSDP2 on a GPU are watched, and end as bare."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.training import mlp
from tests.precision.loops import norms_in, watched

pytestmark = pytest.mark.filterwarnings("ignore")  # of NCCL, about groups


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """The default group, of this process alone."""
    if not torch.cuda.is_available():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def wrapped(how: str) -> tuple[nn.Module, nn.Module]:
    """(what is called, what is watched)."""
    torch.manual_seed(0)
    model = mlp().cuda()
    if how == "ddp":
        return DistributedDataParallel(model), model
    from torch.distributed.fsdp import fully_shard

    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part)
    fully_shard(model)
    return model, model


@pytest.mark.parametrize("pack", ["observe-only", "default"])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_watched_as_bare(how: str, pack: str) -> None:
    """Norms against float64 at every step, no fault of ours, and the weights of a bare run."""
    ends, wants, records = [], [], []
    for watch in (False, True):
        called, model = wrapped(how)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        gw, sink = watched(called, optimizer, pack) if watch else (None, None)
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(12):
            optimizer.zero_grad()
            called(torch.randn(32, 16, device="cuda", generator=generator)).square().mean().backward()
            if watch:
                grads = [p.grad.to_local() if how == "fsdp2" else p.grad for p in model.parameters()]  # type: ignore[union-attr, operator]
                wants.append([float(grad.double().norm()) for grad in grads])
            optimizer.step()
        ends.append([p.to_local() if how == "fsdp2" else p.detach().clone() for p in model.parameters()])  # type: ignore[operator]
        if gw is not None and sink is not None:
            gw.close()
            assert gw.health.errors() == {}
            records = sink.records
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert len(records) == 12
    for record, want in zip(records, wants, strict=True):
        assert list(norms_in(record).values()) == pytest.approx(want, rel=1e-5)
