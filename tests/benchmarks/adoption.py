"""What a new optimizer costs under `gradwatch run`, beyond its watched steps: `python -m tests.benchmarks.adoption`.

A task is a new SGD and 20 steps of a model of 4 parameters: of the same model each time, or of a copy made for the
task (Reptile). What the making and the first ten steps take beyond the last ten is what adopting it costs: parameters
take turns of ten steps, so that these read the same columns. That of a bare run, started in turns with the watched one,
is taken off. Medians over the tasks of a start, the interval over starts.
`--cpu` counts the time that the training thread ran instead of the clock's: for machines that others use, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from tests.benchmarks import tables
from tests.benchmarks.interleave import BOOTSTRAP
from tests.benchmarks.versions import ROOT

SAME, COPIED = "same", "copied"
KINDS = (SAME, COPIED)
STEPS, TASKS, FIRST = 20, 200, 100


def work(copied: bool, tasks: int = TASKS, first: int = FIRST, cpu: bool = False) -> float:
    """µs that a task takes beyond twice its last ten steps, in this process: by medians over tasks."""
    clock = time.thread_time if cpu else time.perf_counter
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    batch = torch.randn(16, 8)
    taken = np.array([_task(model, batch, copied, clock) for _ in range(first + tasks)])[first:]
    making, steps = np.median(taken, 0)[0], np.median(taken, 0)[1:]
    return float(making + steps[: STEPS // 2].sum() - steps[STEPS // 2 :].sum()) * 1e6


def _task(model: nn.Module, batch: torch.Tensor, copied: bool, clock: Callable[[], float]) -> list[float]:
    """Seconds of the making, then of every step."""
    times = [clock()]
    own = copy.deepcopy(model) if copied else model
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-4)
    times.append(clock())
    for _ in range(STEPS):
        optimizer.zero_grad()
        own(batch).square().mean().backward()
        optimizer.step()
        times.append(clock())
    return np.diff(times).tolist()


def measured(kind: str, watched: bool, tasks: int = TASKS, first: int = FIRST, cpu: bool = False) -> float:
    """`work` in a process of its own."""
    run = (
        [sys.executable, "-m", "gradwatch", "run", "--quiet", "--listen", "127.0.0.1:0", "--"]
        if watched
        else []
    )
    given = f"{kind == COPIED}, {tasks}, {first}, {cpu}"
    script = f"from tests.benchmarks.adoption import work; print(work({given}))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*run, sys.executable, "-c", script],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
    return float(json.loads(done.stdout))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=8, help="how often each is started anew (default 8)")
    parser.add_argument("--cpu", action="store_true", help="time of the training thread, not of the clock")
    arguments = parser.parse_args()
    rows = [["new optimizer of", "bare µs", "under gradwatch µs", "added µs"]]
    rng = np.random.default_rng(0)
    for kind in KINDS:
        pairs = np.array(
            [
                [measured(kind, watched, cpu=arguments.cpu) for watched in (False, True)]
                for _ in range(arguments.starts)
            ]
        )
        added = pairs[:, 1] - pairs[:, 0]
        picks = rng.integers(len(added), size=(BOOTSTRAP, len(added)))
        low, high = np.percentile(np.median(added[picks], 1), (2.5, 97.5))
        title = "the same model" if kind == SAME else "a model copied for it"
        bare, own = np.median(pairs, 0)
        rows.append([title, f"{bare:.0f}", f"{own:.0f}", f"{np.median(added):.0f} [{low:.0f}, {high:.0f}]"])
    print(
        f"{tables.as_markdown(rows)}\n\n{tables.machine(1)}, {arguments.starts} starts, {TASKS} tasks of each"
    )


if __name__ == "__main__":
    main()
