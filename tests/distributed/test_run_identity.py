"""Who a process is among its ranks, asked of torch.distributed; no rank waits for another for long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from gradwatch.distributed import run_identity
from gradwatch.distributed.run_identity import placed
from gradwatch.records.run_info import RunInfo

RUN = RunInfo("mine", os.path.join(os.sep, "runs", "mine"), rank=0, world_size=1)
Join = Callable[[int], None]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Become some rank of two, with a real store and a process group that sends nothing."""
    assert fake_pg  # importing it registers the backend

    def become(rank: int) -> None:
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=2)

    monkeypatch.setattr(run_identity, "_named", iter(range(9)))
    monkeypatch.setattr(run_identity, "WAIT_SECONDS", 0.05)
    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_a_process_group_the_environment_is_believed() -> None:
    """Nothing is asked and nothing changes."""
    assert placed(RUN, named=False) is RUN


def test_rank_0_names_the_run(join: Join) -> None:
    """It keeps its own id and lays it down for the others."""
    join(0)
    assert placed(RUN, named=False) == replace(RUN, rank=0, world_size=2)
    assert dist.distributed_c10d._get_default_store().get("gradwatch/run-id/0") == b"mine"


def test_other_ranks_take_its_name_and_folder(join: Join) -> None:
    """Also at the second watch of the process, which has a name of its own."""
    join(1)
    store = dist.distributed_c10d._get_default_store()
    for number, name in enumerate(("first", "second")):
        store.set(f"gradwatch/run-id/{number}", name)
        folder = os.path.join(os.sep, "runs", name)
        assert placed(RUN, named=False) == RunInfo(name, folder, rank=1, world_size=2)


def test_a_run_that_somebody_named_keeps_its_name(join: Join) -> None:
    """An explicit id, or the launcher's: only the rank is corrected, and nobody is waited for."""
    join(1)
    assert placed(RUN, named=True) == replace(RUN, rank=1, world_size=2)


def test_a_rank_that_watches_alone_goes_on_under_its_own_name(join: Join) -> None:
    """Rank 0 does not watch: one short wait, then this rank's own id."""
    join(1)
    assert placed(RUN, named=False) == replace(RUN, rank=1, world_size=2)
