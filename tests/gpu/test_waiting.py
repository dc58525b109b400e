"""Observing never makes the host wait for the device: by torch's own check, and by the calls its profiler saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.training import OPTIMIZERS, Training
from tests.precision.loops import watched
from tests.reading.test_foreach_norms import X, net
from tests.support.recorder import Recorder

WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
SETTLED = 4
"""First steps, in which optimizers make their states and buffers are pinned."""


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where an operation makes the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_reading_norms_never_waits() -> None:
    """The capture alone, with a rule that a fused optimizer obeys on the device."""
    model, x = net().cuda(), X.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    with Recorder(model) as recorder:
        recorder.wait = False
        recorder.gate = True
        for step in range(8):
            torch.cuda.set_sync_debug_mode("error" if step >= SETTLED else "default")
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        assert len(recorder.snapshots) >= 6


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("pack", "optimizer"),
    [*(("observe-only", name) for name in OPTIMIZERS), ("default", "adamw-fused"), ("default", "sgd-fused")],
)
def test_a_watched_step_never_waits(pack: str, optimizer: str, precision: str) -> None:
    """Twenty-four steps of the shipped packs; a scaler's own look at `found_inf` is torch's where it is not fused."""
    training = Training("cnn", optimizer, precision)
    gw, sink = watched(training.model, training.optimizer, pack)
    looks = precision == "fp16" and "fused" not in optimizer
    with gw:
        for step in range(24):
            if step < SETTLED or looks:
                training.step()
            else:
                with no_waiting():
                    training.step()
    assert len(sink.records) == 24
    assert gw.health.errors() == {}


@pytest.mark.parametrize(("pack", "optimizer"), [("observe-only", "adam"), ("default", "adamw-fused")])
def test_a_watched_step_calls_nothing_that_waits(pack: str, optimizer: str) -> None:
    """The profiler counts the calls of the CUDA runtime that wait: as many watched as bare."""
    found = []
    for watch in (False, True):
        training = Training("gpt", optimizer, "bf16")
        gw = watched(training.model, training.optimizer, pack)[0] if watch else None
        for _ in range(SETTLED):
            training.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(20):
                training.step()
        found.append(Counter(event.name for event in profiler.events() if event.name in WAITING_CALLS))
        if gw is not None:
            gw.close()
    bare, seen = found
    # A step judged four steps later may have to wait for its numbers where the host runs ahead; no other call waits.
    seen.pop("cudaEventSynchronize", None)
    assert seen == bare


@pytest.mark.parametrize("pack", ["observe-only", "default"])
def test_a_rejected_step_is_told_without_waiting(pack: str) -> None:
    """A loss that overflows under a fused optimizer and a GradScaler: told later, with its own scale."""
    model, x = net().cuda(), X.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    gw, sink = watched(model, optimizer, pack)
    with gw:
        for step in range(12):
            torch.cuda.set_sync_debug_mode("error" if step >= SETTLED else "default")
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).sum() * (float("inf") if step == 6 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.set_sync_debug_mode("default")
    skipped = [record.snapshot.scalars["scaler_skip"] for record in sink.records]
    assert skipped == [0.0] * 6 + [1.0] + [0.0] * 5
    assert [record.snapshot.loss_scale for record in sink.records][5:8] == [1024.0, 1024.0, 512.0]
