"""What watching costs under DDP: two ranks over gloo on this machine, bare and watched steps in turn.

    python -m tests.benchmarks.ranks [--rounds 60] [--width 512] [--layers 6] [--markdown]

Every rank holds bare and watched replicas of one model, with one backward a step and with four, and steps them
in the same shuffled order; rank 0 tells the ratio of medians with a 95 % interval (rounds resampled jointly).
The whole default watch: capture, rules, journal, endpoint. The ranks share a machine, so the collective costs
what two processes on one host cost, not a network.
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwatch
from gradwatch.distributed import process_group
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from tests.benchmarks import tables

WORLD = 2
WARM_UP = 25
WITHOUT_RANKS = """
version: 1
extends: [default]
rules:
  rank-outlier: {enabled: false}
  rank-mismatch: {enabled: false}
"""
BARE = "bare"
PACKS = {"gradwatch, default": "", "gradwatch, default without rank rules": WITHOUT_RANKS}
MICROS = (1, 4)
ROUNDS, WIDTH, LAYERS = 60, 512, 6


class Row(NamedTuple):
    """One loop: median milliseconds of a step, and its ratio to the bare loop with a 95 % interval."""

    name: str
    micros: int
    milliseconds: float
    ratio: float
    low: float
    high: float


class Found(NamedTuple):
    """What rank 0 measured; `exchange_us` median microseconds of one exchange, both ranks ready."""

    numel: int
    rounds: int
    exchange_us: float
    errors: list[str]
    rows: list[Row]


def model_of(width: int, layers: int) -> nn.Module:
    """A perceptron of `layers` square matrices."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def stepper(
    width: int, layers: int, rank: int, micros: int
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """A DDP replica, its optimizer, and one timed step of `micros` backwards in seconds (all but the last unsynced)."""
    model = DistributedDataParallel(model_of(width, layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batch = torch.randn(64, width, generator=torch.Generator().manual_seed(rank))

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(micros - 1):
                model(batch).square().sum().backward()
        model(batch).square().sum().backward()
        optimizer.step()
        return time.perf_counter() - started

    return model, optimizer, step


def worker(rank: int, folder: str, rounds: int, width: int, layers: int) -> None:
    """One rank: everybody in turns; rank 0 writes down what it measured."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    contenders, watches = {}, []
    for micros in MICROS:
        _, _, contenders[BARE, micros] = stepper(width, layers, rank, micros)
        for name, text in PACKS.items():
            rules: str | RuleSet = parse_rules(text) if text else "default"
            model, optimizer, contenders[name, micros] = stepper(width, layers, rank, micros)
            watches.append(
                gradwatch.watch(model, optimizer, rules=rules, run_dir=folder, listen="127.0.0.1:0")
            )
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in contenders}
    order = random.Random(0)  # the same on both ranks
    for turn in range(WARM_UP + rounds):
        for key in order.sample(sorted(contenders), len(contenders)):
            contenders[key]()  # its data finds the caches again
            took = contenders[key]()
            if turn >= WARM_UP:
                seconds[key].append(took)
    alone = collective(200, 12 * layers)
    errors = [watch.health.errors() for watch in watches]
    if rank == 0:
        numel = sum(p.numel() for p in model_of(width, layers).parameters())
        found = Found(numel, rounds, alone, [str(one) for one in errors if one], compared(seconds))
        Path(folder, "found.json").write_text(json.dumps(found._asdict()))
    for watch in watches:
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


def compared(seconds: dict[tuple[str, int], list[float]]) -> list[Row]:
    """Every watched loop against the bare one with as many micro-batches."""
    generator = np.random.default_rng(0)
    rows = []
    for (name, micros), taken in seconds.items():
        ours, bare = np.array(taken), np.array(seconds[BARE, micros])
        picks = generator.integers(len(ours), size=(2000, len(ours)))
        drawn = np.median(ours[picks], axis=1) / np.median(bare[picks], axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        ratio = float(np.median(ours) / np.median(bare))
        rows.append(Row(name, micros, statistics.median(taken) * 1e3, ratio, float(low), float(high)))
    return rows


def measure(rounds: int, width: int, layers: int) -> Found:
    """Launch the ranks and wait for what rank 0 found."""
    with tempfile.TemporaryDirectory(prefix="gradwatch-bench-") as folder:
        mp.spawn(worker, (folder, rounds, width, layers), nprocs=WORLD)
        found = json.loads(Path(folder, "found.json").read_text())
    return Found(**{**found, "rows": [Row(*row) for row in found["rows"]]})


def table(found: Found, markdown: bool) -> str:
    """Text for a terminal, or Markdown; median step, ratio of medians, its 95 % interval."""
    head = f"{WORLD} ranks over gloo on one machine, {found.numel:,} parameters, {found.rounds} rounds"
    lines = [["under DDP", "micro-batches", "step, ms", "÷ bare", "95 % interval"]]
    for row in found.rows:
        interval = f"{row.low:.3f} to {row.high:.3f}"
        lines.append([row.name, str(row.micros), f"{row.milliseconds:.2f}", f"{row.ratio:.3f}", interval])
    rendered = tables.as_markdown(lines) if markdown else tables.as_text(lines)
    alone = f"one exchange between the ranks, both ready: {found.exchange_us:.0f} µs"
    errors = [f"internal errors: {', '.join(found.errors)}"] if found.errors else []
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
