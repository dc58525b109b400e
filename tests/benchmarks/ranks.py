"""What watching costs under DDP: two ranks over gloo on this machine, bare and watched steps in turn.

    python -m tests.benchmarks.ranks [--rounds 60] [--width 512] [--layers 6]

Every rank holds one bare and several watched replicas of one model and steps them in the same shuffled order;
the ratio is taken within a round, on rank 0, and its median over rounds is told with a 95 % interval. The
ranks share a machine, so the collective costs what two processes on one host cost, not a network.
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwatch
from gradwatch.hooks import group
from gradwatch.rulefile import parse_rules
from gradwatch.rules import RuleSet

WORLD = 2
WARM_UP = 25
WITHOUT_RANKS = """
version: 1
extends: [default]
rules:
  rank-outlier: {enabled: false}
  rank-mismatch: {enabled: false}
"""
PACKS = {"default pack": "", "default pack without rank rules": WITHOUT_RANKS}


def model_of(width: int, layers: int) -> nn.Module:
    """A perceptron of `layers` square matrices."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def stepper(
    width: int, layers: int, rank: int
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """A DDP replica, its optimizer, and one timed step of it in seconds."""
    model = DistributedDataParallel(model_of(width, layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(64, width, generator=torch.Generator().manual_seed(rank))

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - started

    return model, optimizer, step


def worker(rank: int, folder: str, rounds: int, width: int, layers: int) -> None:
    """One rank: everybody in turns; rank 0 tells."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    _, _, bare = stepper(width, layers, rank)
    contenders, watches = {"bare": bare}, []
    for name, text in PACKS.items():
        rules: str | RuleSet = parse_rules(text) if text else "default"
        model, optimizer, contenders[name] = stepper(width, layers, rank)
        watches.append(gradwatch.watch(model, optimizer, rules=rules, sinks=[], run_dir=folder))
    order, seconds = random.Random(0), {name: [] for name in contenders}  # the same order on both ranks
    for turn in range(WARM_UP + rounds):
        for name in order.sample(sorted(contenders), len(contenders)):
            contenders[name]()  # its data finds the caches again
            took = contenders[name]()
            if turn >= WARM_UP:
                seconds[name].append(took)
    if rank == 0:
        tell(seconds, sum(p.numel() for p in model_of(width, layers).parameters()))
        print(f"internal errors: {[watch.health.errors() for watch in watches]}")
        print(f"one collective of the default pack alone: {collective(rank, 200, 12 * layers):.0f} us")
    else:
        collective(rank, 200, 12 * layers)
    for watch in watches:
        watch.close()
    dist.barrier()
    dist.destroy_process_group()


def collective(rank: int, times: int, length: int) -> float:
    """Median microseconds of one exchange of `length` numbers, both ranks ready."""
    own = group.Group(group.meet("benchmark", {}, {}))
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        own.total(np.zeros(length))
        taken.append(time.perf_counter() - started)
    own.close()
    return statistics.median(taken) * 1e6


def tell(seconds: dict[str, list[float]], numel: int) -> None:
    """The table."""
    print(f"{WORLD} ranks, {numel:,} parameters, torch {torch.__version__}, {len(seconds['bare'])} rounds")
    generator = np.random.default_rng(0)
    bare = np.array(seconds["bare"])
    print(f"{'':34s}{'median ms':>10s}{'ratio':>8s}   95 % interval")
    for name, taken in seconds.items():
        ratios = np.array(taken) / bare
        drawn = generator.choice(ratios, (2000, len(ratios)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        median = statistics.median(taken) * 1e3
        print(f"{name:34s}{median:10.2f}{np.median(ratios):8.3f}   {low:.3f} to {high:.3f}")


def main() -> None:
    """Parse, launch, wait."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradwatch-bench-") as folder:
        mp.spawn(worker, (folder, asked.rounds, asked.width, asked.layers), nprocs=WORLD)


if __name__ == "__main__":
    main()
