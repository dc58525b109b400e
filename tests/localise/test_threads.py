"""Threads that train at once, one of them on NaN: the search for its cause is not met by the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.localise.replay.state_restored import OTHER_THREADS
from tests.support.kept import Kept

STEPS, AT_FAULT = 60, 2


def trained(**options: Any) -> tuple[list[list[torch.Tensor]], list[Kept]]:
    """The weights of three threads after their steps, and what a watch told; every tenth batch of one has NaN."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    together = threading.Barrier(3, timeout=60)

    def train(k: int) -> None:
        numbers = torch.Generator().manual_seed(k)
        for step in range(STEPS):
            batch = torch.randn(8, 4, generator=numbers)
            if k == AT_FAULT and step % 10 == 9:
                batch[:] = float("nan")
            if step % 10 == 9:  # the others train while its cause is sought
                together.wait()
            optimizers[k].zero_grad()
            models[k](batch).square().mean().backward()
            own = optimizers[k].param_groups[0]["params"]
            assert all(one is other for one, other in zip(own, models[k].parameters(), strict=True))
            optimizers[k].step()

    threads = [threading.Thread(target=train, args=(k,)) for k in range(3)]
    kept = [Kept()]
    if options:
        with gradwatch.watch(models, optimizers, sinks=kept, strict=True, **options):
            _run(threads)
    else:
        _run(threads)
    return [[param.detach().clone() for param in model.parameters()] for model in models], kept


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("switching")
def test_the_weights_of_the_other_threads_are_as_unwatched() -> None:
    """Bit for bit; the cause is said not to be known, and why."""
    bare, _ = trained()
    watched, (kept,) = trained(rules="default")
    for k in {0, 1}:
        for one, other in zip(bare[k], watched[k], strict=True):
            assert torch.equal(one, other), k
    causes = [finding for record in kept.records for finding in record.findings if finding.by == "replay"]
    assert causes
    assert not any(finding.found for finding in causes)
    assert any(OTHER_THREADS in finding.note for finding in causes)
