"""Is this checkout slower than another? `python -m tests.benchmarks.versions OTHER [WORKLOAD ...] [--gate]`.

OTHER is the folder of another checkout, e.g. made by `git worktree add OTHER COMMIT`. A process of each (under DDP two)
holds the same watched training, another holds a bare one, and all three step in turns, in shuffled order, on a word
from here: what slows the machine for a while slows all alike. Where a process happens to lie in memory makes it some
per cent faster or slower for as long as it lives, so all are started anew several times, and the interval is one over
starts. The whole default watch: rules, journal, endpoint.

Axes: B starts, N rounds of one, T timed steps of a turn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tests.benchmarks import tables
from tests.benchmarks.interleave import BOOTSTRAP, Interval, Sample, Seconds, timed
from tests.benchmarks.workloads import WORKLOADS, Task

ROOT = Path(__file__).resolve().parents[2]
WATCHED_STEPS_FIRST = 60  # past the warm-up, and past the steps that a loop takes to be called calm
SETTLE, STEPS = 1, 3
TURN = 0.15
"""Seconds of a turn at least: of short steps hundreds, so that a process that wakes is not what is measured."""
WORKER = (
    "import sys; root, checkout, without, name, rank, port = sys.argv[1:]; sys.path[0] = checkout or root; "
    "import gradwatch; assert gradwatch.__file__.startswith(sys.path[0] + '/'); sys.path[0] = root; "
    "from tests.benchmarks.versions import work; work(bool(checkout), without, name, int(rank), port)"
)
SMALL, DDP, MANY, CLIPPED = "small", "ddp", "many", "clipped"
NAMES = ("mlp", "tiny", "resnet", "gpt", "embedding", SMALL, DDP, MANY)
SLOWER = 0.02
"""(new − old) / old of a workload that `--gate` refuses where the whole interval lies above it."""


class Side(NamedTuple):
    """Who is measured: the folder of a checkout ("" = bare), and a fast path of `ablations` that is off there."""

    checkout: str
    without: str = ""


class Row(NamedTuple):
    """One workload: medians in milliseconds, and (new − old) / old with its 95 % interval, by wall and CPU time."""

    name: str
    bare: float
    old: float
    new: float
    wall: Interval
    cpu: Interval


def small(clipping: float | None = None) -> Task:
    """Eight parameters, about a millisecond a step; with `clip_grad_norm_` where `clipping` is its bound."""
    torch.manual_seed(0)
    widths = (32, 64, 64, 64, 10)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    batches = tuple((torch.randn(64, 32), torch.randint(0, 10, (64,))) for _ in range(8))
    kind = Task if clipping is None else functools.partial(_Clipped, bound=clipping)
    return kind(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches)


def many() -> Task:
    """10,000 parameters of 4 to 16 elements: what one more costs decides the step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5_000)])
    batches = tuple((torch.randn(16, 4), torch.randint(0, 4, (16,))) for _ in range(8))
    return Task(model, torch.optim.SGD(model.parameters(), lr=1e-4), batches)


def parallel(rank: int, port: str) -> Task:
    """The small model, wider, in DistributedDataParallel over gloo."""
    import torch.distributed as dist

    rendezvous = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = nn.parallel.DistributedDataParallel(net)
    batches = tuple((torch.randn(64, 32), torch.randint(0, 10, (64,))) for _ in range(8))
    return Task(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches)


@dataclass(eq=False)
class _Clipped(Task):
    """A loop that clips before each step."""

    bound: float = math.inf

    def step(self) -> None:
        self.forward().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.bound)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def work(watched: bool, without: str, name: str, rank: int, port: str) -> None:
    """A worker: reads how many steps to take, line by line; answers each with [wall, CPU] seconds of every step."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    own: dict[str, Callable[[], Task]] = {
        SMALL: small,
        DDP: lambda: parallel(rank, port),
        MANY: many,
        CLIPPED: lambda: small(1e-3),
    }
    task = own.get(name, lambda: WORKLOADS[name].task())()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if without:
            from tests.benchmarks.ablations import ABLATIONS

            ABLATIONS[without].switch_off()
        if watched:
            import gradwatch

            stack.enter_context(
                gradwatch.watch(task.model, task.optimizer, run_dir=folder, listen="127.0.0.1:0")
            )
        step = timed(task.step)
        print("[]", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps([step() for _ in range(int(line))]), file=answers, flush=True)


class Contender:
    """The processes that step one training of one side."""

    def __init__(self, side: Side, name: str, port: int) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environ.pop("PYTHONPATH", None)
        command = [sys.executable, "-c", WORKER, str(ROOT), *side, name]
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environ,
            )
            for rank in range(1 + (name == DDP))
        ]

    def wait(self) -> None:
        """Until every process has made its training."""
        self._answer()

    def __call__(self, steps: int) -> list[Sample]:
        """Take so many steps; of several ranks the first one's times."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        return self._answer()

    def _answer(self) -> list[Sample]:
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise RuntimeError("a worker ended; run it by hand to see why")
        return [Sample(*each) for each in json.loads(lines[0])]

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.communicate()  # reaps it, and closes its pipes


def measure(name: str, sides: dict[str, Side], rounds: int) -> dict[str, tuple[Seconds, Seconds]]:
    """(wall, CPU) seconds[N, T] of every contender, in turns."""
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for number, (title, side) in enumerate(sides.items()):
            contenders[title] = Contender(side, name, _free_port() + number)
            stack.callback(contenders[title].close)
        fastest = math.inf
        for one in contenders.values():
            one.wait()
            fastest = min(fastest, *(step.wall for step in one(WATCHED_STEPS_FIRST)))
        steps = max(STEPS, math.ceil(TURN / fastest))
        settle = max(SETTLE, steps // 10)
        found: dict[str, list[list[Sample]]] = {title: [] for title in sides}
        rng = np.random.default_rng(0)
        for _ in range(rounds):
            for title in rng.permuted(np.array(list(sides))).tolist():
                found[title].append(contenders[title](settle + steps)[settle:])
    clocks = {title: np.array(samples) for title, samples in found.items()}
    return {title: (each[..., 0], each[..., 1]) for title, each in clocks.items()}


def relative(new: Seconds, old: Seconds) -> float:
    """The median over rounds of (new − old) / old of their mean steps, of one start.

    The mean, because steps put off are judged in one of many.
    """
    mine, other = np.mean(new, 1), np.mean(old, 1)
    return float(np.median((mine - other) / other))


def interval(changes: list[float]) -> Interval:
    """The median over starts, with its 95 % bootstrap interval."""
    change = np.array(changes)
    picks = np.random.default_rng(0).integers(len(change), size=(BOOTSTRAP, len(change)))
    low, high = np.percentile(np.median(change[picks], 1), (2.5, 97.5))
    return Interval(float(np.median(change)), float(low), float(high))


def compared(name: str, other: str, starts: int, rounds: int) -> Row:
    """One workload measured."""
    sides = {"bare": Side(""), "old": Side(other), "new": Side(str(ROOT))}
    found = [measure(name, sides, rounds) for _ in range(starts)]
    titles = ("bare", "old", "new")
    medians = [
        float(np.median([np.median(one[title][0].mean(1)) for one in found])) * 1e3 for title in titles
    ]
    changes = [[relative(one["new"][clock], one["old"][clock]) for one in found] for clock in range(2)]
    return Row(name, *medians, *map(interval, changes))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def percent(found: Interval) -> str:
    """As it is printed."""
    return f"{found.value:+.1%} [{found.low:+.1%}, {found.high:+.1%}]"


def main() -> int:
    """Print the table; 1 where `--gate` is asked and a workload has become slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", metavar="OTHER", help="folder of the other checkout")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="WORKLOAD", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--starts", type=int, default=8, help="how often all are started anew (default 8)")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each after one start (default 60)")
    parser.add_argument(
        "--gate", action="store_true", help=f"exit 1 where one is slower by over {SLOWER:.0%}%"
    )
    arguments = parser.parse_args()
    slower = 0
    rows = [["workload", "bare ms", "old ms", "new ms", "(new − old) ÷ old", "the same of CPU time"]]
    for name in arguments.names:
        row = compared(name, str(Path(arguments.other).resolve()), arguments.starts, arguments.rounds)
        numbers = [f"{ms:.2f}" for ms in (row.bare, row.old, row.new)]
        slower += row.wall.low > SLOWER
        rows.append([row.name, *numbers, percent(row.wall), percent(row.cpu)])
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(
        f"{tables.as_markdown(rows)}\n\n{tables.machine(1)}, {arguments.starts} × {arguments.rounds} rounds"
    )
    return int(arguments.gate and slower > 0)


if __name__ == "__main__":
    sys.exit(main())
