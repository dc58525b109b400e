"""Ranks whose rules only observe exchange at every tenth step: who is named when, and what no rank waits for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.capture.columns import norm_local
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.distributed import process_group
from gradwatch.session.binding.bind_optimizer import Binder
from gradwatch.session.watch import session_of
from tests.ranks.launch import fingerprint
from tests.ranks.situations import Collector, Net, batch, fsdp2, loss_of
from tests.ranks.trials import Flip, made, take_step, told, watched, weights

DEFAULT = "version: 1\nextends: [default]\n"
ACTING = """
version: 1
rules:
  non-finite: {detect: {kind: nonfinite}, do: [skip_step]}
  rank-outlier: {detect: {kind: rank_outlier}, do: [skip_step]}
  rank-mismatch: {detect: {kind: rank_mismatch}, do: [stop]}
"""
EACH_STEP = "rules: {loss-non-finite: {do: [skip_step]}}\n"
THIRD_STEP = "rules: {rank-outlier: {every: 3}}\n"
EARLY = DEFAULT + "rules: {rank-outlier: {warmup: 6}}\n"  # of 20 samples 200 steps would pass
POISONED, SHIFTED, FLIPPED = 13, 73, 17


def with_column(collector: Collector, column: str) -> list[int]:
    """The steps that have a column."""
    return [one.snapshot.step for one in collector.records if column in one.snapshot.columns]


def step_with(model: nn.Module, optimizer: Any, step: int, rank: int, factor: float = 1.0) -> None:
    """One step; rank 1's batch, or its loss, is multiplied."""
    optimizer.zero_grad()
    (loss_of(model, batch(step, 0, rank)) * (factor if rank == 1 else 1.0)).backward()
    optimizer.step()


def poisoned(rank: int, text: str, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Any:
    """A NaN in one batch of rank 1, once."""
    _, model, optimizer = made(wrap)
    with watched(model, optimizer, text) as (gw, collector):
        for step in range(32):
            step_with(model, optimizer, step, rank, float("nan") if step == POISONED else 1.0)
        return {
            "outlier": told(collector, "rank-outlier"),
            "skipped": [one.snapshot.step for one in collector.records if one.decision.skip],
            "hash": weights(model),
            "errors": gw.health.errors(),
        }


def shifted(rank: int, text: str, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Any:
    """Rank 1's own gradients are far larger from one step on."""
    _, model, optimizer = made(wrap)
    with watched(model, optimizer, text) as (gw, collector):
        for step in range(SHIFTED + 12):
            step_with(model, optimizer, step, rank, 1e4 if step >= SHIFTED else 1.0)
        gw.flush()
        return {"outlier": told(collector, "rank-outlier"), "errors": gw.health.errors()}


def diverged(rank: int, text: str) -> dict[str, Any]:
    """One reduction, once, gives rank 1 one other bit: the replicas differ from there on, their reductions do not."""
    _, model, optimizer = made()
    flip = Flip(model, rank)
    stopped = None
    with watched(model, optimizer, text) as (gw, collector):
        for step in range(32):
            flip.now = step == FLIPPED
            try:
                take_step(model, optimizer, step, rank)
            except Exception as error:
                stopped = [step, type(error).__name__]
                break
        return {
            "mismatch": told(collector, "rank-mismatch"),
            "stopped": stopped,
            "errors": gw.health.errors(),
        }


def work_done(rank: int) -> dict[str, Any]:
    """Exchanges and reads of local gradients of an ordinary loop, and the steps that wait to be judged meanwhile."""
    _, model, optimizer = made()
    starts, ends, reads, now = [], [], [], [0]
    start, observe = process_group.Group.start, norm_local._norm_of_small

    def started(*args: Any) -> Any:
        starts.append(now[0])
        wait = start(*args)

        def waited() -> Any:
            ends.append(now[0])
            return wait()

        return waited

    def read(*args: Any) -> Any:
        reads.append(now[0])
        return observe(*args)

    with (
        mock.patch.object(process_group.Group, "start", started),
        mock.patch.object(norm_local, "_norm_of_small", read),
        mock.patch.object(norm_local, "PROBES", 0),
        watched(model, optimizer, DEFAULT) as (gw, collector),
    ):
        for step in range(95):
            now[0] = step
            take_step(model, optimizer, step, rank)
        waiting = 95 - len(collector.records)
        gw.flush()
        steps = [one.snapshot.step for one in collector.records]
        return {
            "started": starts,
            "ended": ends,
            "read": sorted(set(reads)),
            "waiting": waiting,
            "steps": steps,
            "ranked": with_column(collector, "rank_norm"),
            "errors": gw.health.errors(),
        }


def faults(rank: int) -> dict[str, Any]:
    """Rank 1 measures nothing at a step that is not due, nor even counts one, and nothing at one that is due."""
    _, model, optimizer = made()
    original, broken = OptimizerCapture.close_window, [False]
    entered, uncounted = Binder.enter, [False]

    def failing(*args: Any) -> Any:
        if broken[0] and rank == 1:
            raise MemoryError("injected")
        return original(*args)

    def failing_to_enter(*args: Any) -> Any:
        if uncounted[0] and rank == 1:
            raise MemoryError("injected")
        return entered(*args)

    said: list[str] = []
    started = time.monotonic()
    with (
        mock.patch.object(OptimizerCapture, "close_window", failing),
        mock.patch.object(Binder, "enter", failing_to_enter),
        watched(model, optimizer, DEFAULT, strict=False) as (gw, collector),
    ):
        gw.health.on_first = lambda component, error: said.append(f"{component}: {error}")
        for step in range(64):
            broken[0], uncounted[0] = step in (14, 30), step == 15
            take_step(model, optimizer, step, rank)
        gw.flush()
        return {
            "seconds": time.monotonic() - started,
            "mismatch": told(collector, "rank-mismatch"),
            "said": said,
            "compared": with_column(collector, "rank_mismatch"),
            "ranked": with_column(collector, "rank_norm"),
            "hash": weights(model),
            "alone": session_of(gw).attached.degraded,
        }


def accumulating(rank: int) -> dict[str, Any]:
    """The ranks take other numbers of backwards a step, and one has a pause at a step with an exchange under way."""
    _, model, optimizer = made()
    started = time.monotonic()
    with watched(model, optimizer, DEFAULT) as (gw, collector):
        for step in range(45):
            optimizer.zero_grad()
            for micro in range(step % 3 if rank else 2):
                with model.no_sync():
                    loss_of(model, batch(step, micro + 1, rank)).backward()
            take_backward(model, step, rank)
            optimizer.step()
            if rank and step == 20:
                time.sleep(0.3)
        gw.flush()
        return {
            "seconds": time.monotonic() - started,
            "ranked": with_column(collector, "rank_mismatch"),
            "mismatch": told(collector, "rank-mismatch"),
            "hash": weights(model),
            "errors": gw.health.errors(),
        }


def take_backward(model: nn.Module, step: int, rank: int) -> None:
    """The backward that reduces."""
    loss_of(model, batch(step, 0, rank)).backward()


def joined(rank: int) -> dict[str, Any]:
    """Epochs of unequal length, with steps in common before and after each of them."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    started = time.monotonic()
    with watched(model, optimizer, DEFAULT) as (gw, collector):
        for _ in range(2):
            for step in range(13):
                take_step(model, optimizer, step, rank)
            with model.join():
                for step in range((4, 9)[rank]):
                    take_step(model, optimizer, step, rank)
        for step in range(25):
            take_step(model, optimizer, step, rank)
        gw.flush()
        return {
            "seconds": time.monotonic() - started,
            "mismatch": told(collector, "rank-mismatch"),
            "ranked": with_column(collector, "rank_mismatch"),
            "hash": weights(model),
            "errors": gw.health.errors(),
        }


def leaves(rank: int) -> dict[str, Any]:
    """Rank 1 stops watching between two exchanges: rank 0 goes on alone from the next one."""
    _, model, optimizer = made()
    started = time.monotonic()
    with watched(model, optimizer, DEFAULT, strict=False) as (gw, _):
        for step in range(30):
            if rank == 1 and step == 14:
                gw.close()
            take_step(model, optimizer, step, rank)
        return {
            "seconds": time.monotonic() - started,
            "errors": gw.health.errors(),
            "hash": weights(model),
        }


def ends_with_an_exchange(rank: int) -> dict[str, Any]:
    """The last step is due, and rank 1 comes to it late: closing waits for what has begun, and no longer."""
    _, model, optimizer = made()
    with watched(model, optimizer, DEFAULT) as (gw, collector):
        for step in range(61):
            take_step(model, optimizer, step, rank)
        if rank:
            time.sleep(0.3)
        started = time.monotonic()
        gw.close()
        return {
            "seconds": time.monotonic() - started,
            "last": collector.records[-1].snapshot.step,
            "ranked": with_column(collector, "rank_mismatch")[-1],
        }


def forked(rank: int) -> dict[str, Any]:
    """A child forked by rank 0 steps and closes the watch; the exchange under way waits for rank 1 then."""
    _, model, optimizer = made()
    with watched(model, optimizer, DEFAULT) as (gw, collector):
        for step in range(90):
            optimizer.zero_grad()
            take_backward(model, step, rank)
            if step == 70 and rank:
                time.sleep(0.5)
            optimizer.step()
            if step == 70 and not rank and not (child := os.fork()):
                optimizer.step()
                gw.close()
                os._exit(0)
        deadline, ended, status = time.monotonic() + 10, rank, 0
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        gw.flush()
        return {
            "child": status if ended else "hangs",
            "ranked": with_column(collector, "rank_mismatch")[-2:],
            "errors": gw.health.errors(),
        }


def unchanged(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """The same training without and with a watch, past the first steps that are judged together."""
    hashes = []
    for watch in (False, True):
        _, model, optimizer = made(wrap)
        with watched(model, optimizer, DEFAULT) if watch else contextlib.nullcontext():
            for step in range(72):
                take_step(model, optimizer, step, rank)
        hashes.append(fingerprint(model.parameters()))
    return {"hashes": hashes}


SITUATIONS: dict[str, Callable[[int], Any]] = {
    "poisoned": lambda rank: poisoned(rank, DEFAULT),
    "poisoned under fsdp2": lambda rank: poisoned(rank, DEFAULT, fsdp2),
    "poisoned, acting": lambda rank: poisoned(rank, ACTING),
    "shifted": lambda rank: shifted(rank, EARLY),
    "shifted under fsdp2": lambda rank: shifted(rank, EARLY, fsdp2),
    "shifted, acting": lambda rank: shifted(rank, ACTING),
    "diverged": lambda rank: diverged(rank, DEFAULT),
    "diverged beside a rule at each step": lambda rank: diverged(rank, DEFAULT + EACH_STEP),
    "diverged beside a rule at every third step": lambda rank: diverged(rank, DEFAULT + THIRD_STEP),
    "diverged, acting": lambda rank: diverged(rank, ACTING),
    "work done": work_done,
    "faults": faults,
    "accumulating": accumulating,
    "joined": joined,
    "leaves": leaves,
    "ends with an exchange": ends_with_an_exchange,
    "forked": forked,
    "unchanged ddp": lambda rank: unchanged(rank, DistributedDataParallel),
    "unchanged fsdp2": lambda rank: unchanged(rank, fsdp2),
}
