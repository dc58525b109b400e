"""What watching costs among ranks: two of them over gloo on this machine, bare and watched steps in turn.

    python -m tests.benchmarks.ranks [--rounds 12] [--width 512] [--layers 6] [--markdown]

DDP with one backward a step and with four, and FSDP2: in processes of their own a bare replica and a watched one,
stepped in turns of 32 steps in the same shuffled order, because ordinary steps are judged up to 32 at a time. Rank 0
tells the ratio of the medians of whole turns with a 95 % interval (turns resampled jointly). The whole default watch:
capture, rules, journal, endpoint. The ranks share a machine, so the collective costs what two processes on one host
cost, not a network.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwatch
from gradwatch.distributed import process_group
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.benchmarks import tables

WORLD = 2
TURN, WARM_UP = 32, 4
"""Steps of a turn, and turns before the first that counts: a loop is learned by then."""
WITHOUT_RANKS = """
version: 1
extends: [default]
rules:
  rank-outlier: {enabled: false}
  rank-mismatch: {enabled: false}
"""
PACKS = {"default": "", "default without rank rules": WITHOUT_RANKS}
Loops = tuple[tuple[str, int], ...]
LOOPS: Loops = (("DDP", 1), ("DDP", 4), ("FSDP2", 1))
"""What reduces the gradients, and micro-batches a step."""
ROUNDS, WIDTH, LAYERS = 12, 512, 6


class Row(NamedTuple):
    """One loop: median milliseconds of a bare step and of a watched one, their ratio with a 95 % interval."""

    loop: str
    micros: int
    pack: str
    bare: float
    watched: float
    ratio: float
    low: float
    high: float
    errors: str


class Found(NamedTuple):
    """What rank 0 measured; `exchange_us` median microseconds of one exchange, both ranks ready."""

    numel: int
    rounds: int
    exchange_us: float
    rows: list[Row]


def model_of(width: int, layers: int) -> nn.Module:
    """A perceptron of `layers` square matrices."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def stepper(
    loop: str, width: int, layers: int, rank: int, micros: int
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A replica or its shards, the optimizer, and one step of `micros` backwards (all but the last unsynced)."""
    model = model_of(width, layers)
    if loop == "DDP":
        model = DistributedDataParallel(model)
    else:
        for part in model:
            if isinstance(part, nn.Linear):
                fully_shard(part)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batch = torch.randn(64, width, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(micros - 1):
            with model.no_sync():
                model(batch).square().sum().backward()
        model(batch).square().sum().backward()
        optimizer.step()

    return model, optimizer, step


def worker(
    rank: int, folder: str, loop: str, micros: int, pack: str, sizes: tuple[int, int, int, int]
) -> None:
    """One rank: both in turns; rank 0 writes down what it measured."""
    rounds, turn, width, layers = sizes
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    _, _, bare = stepper(loop, width, layers, rank, micros)
    model, optimizer, watched = stepper(loop, width, layers, rank, micros)
    rules: str | RuleSet = parse_rules(PACKS[pack]) if PACKS[pack] else "default"
    watch = gradwatch.watch(model, optimizer, rules=rules, run_dir=folder, listen="127.0.0.1:0")
    seconds = np.empty((WARM_UP + rounds, 2))
    order = random.Random(0)  # the same on both ranks
    for row in seconds:
        for k in order.sample(range(2), 2):
            started = time.perf_counter()
            for _ in range(turn):
                (bare, watched)[k]()
            row[k] = (time.perf_counter() - started) / turn
    alone, errors = collective(200, 12 * layers), watch.health.errors()
    if rank == 0:
        told = [alone, str(errors or ""), *compared(seconds[WARM_UP:])]
        Path(folder, "found.json").write_text(json.dumps(told), encoding="utf-8")
    watch.close()
    dist.barrier()
    dist.destroy_process_group()


def collective(times: int, length: int) -> float:
    """Median microseconds of one exchange of `length` numbers, both ranks ready."""
    own = process_group.Group(process_group.meet("benchmark", {}, {}))
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        own.total(np.zeros(length))
        taken.append(time.perf_counter() - started)
    own.close()
    return statistics.median(taken) * 1e6


def compared(seconds: NDArray[np.float64]) -> tuple[float, ...]:
    """Milliseconds of a bare and of a watched step, their ratio, and its interval; `seconds` float64[rounds, 2]."""
    picks = np.random.default_rng(0).integers(len(seconds), size=(2000, len(seconds)))
    drawn = np.median(seconds[picks], axis=1)
    low, high = np.percentile(drawn[:, 1] / drawn[:, 0], [2.5, 97.5])
    bare, watched = np.median(seconds, axis=0)
    return float(bare * 1e3), float(watched * 1e3), float(watched / bare), float(low), float(high)


def measure(rounds: int, width: int, layers: int, turn: int = TURN, loops: Loops = LOOPS) -> Found:
    """Launch the ranks, anew for each loop and pack, and gather what rank 0 found."""
    rows, exchanges = [], []
    for loop, micros in loops:
        for pack in PACKS:
            with tempfile.TemporaryDirectory(prefix="gradwatch-bench-") as folder:
                mp.spawn(worker, (folder, loop, micros, pack, (rounds, turn, width, layers)), nprocs=WORLD)
                alone, errors, *numbers = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
            exchanges.append(alone)
            rows.append(Row(loop, micros, pack, *numbers, errors))
    numel = sum(p.numel() for p in model_of(width, layers).parameters())
    return Found(numel, rounds, statistics.median(exchanges), rows)


def table(found: Found, markdown: bool) -> str:
    """Text for a terminal, or Markdown; median step, ratio of medians, its 95 % interval."""
    head = f"{WORLD} ranks over gloo on one machine, {found.numel:,} parameters, {found.rounds} rounds"
    lines = [["loop", "micro-batches", "rules", "bare, ms", "watched, ms", "÷ bare", "95 % interval"]]
    for row in found.rows:
        step = f"{row.bare:.2f}", f"{row.watched:.2f}", f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}"
        lines.append([row.loop, str(row.micros), row.pack, *step])
    rendered = tables.as_markdown(lines) if markdown else tables.as_text(lines)
    alone = f"one exchange between the ranks, both ready: {found.exchange_us:.0f} µs"
    errors = [f"internal errors: {row.errors}" for row in found.rows if row.errors]
    return "\n\n".join([head, rendered, alone, *errors])


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--markdown", action="store_true", help="the table as Markdown, for gradwatch/docs/cost.md"
    )
    asked = parser.parse_args()
    print(table(measure(asked.rounds, asked.width, asked.layers), asked.markdown))


if __name__ == "__main__":
    main()
