"""What `gradwatch run` adds to a start, and what attaching and closing cost: `python -m tests.benchmarks.start`.

A script that imports torch and takes three steps, bare and under `gradwatch run` in turns: what its processes take, the
launcher's included, of CPU and of the clock. In a process of its own, `gradwatch.watch` of a model with 1,000
parameters, the first steps and `close()`, again and again, the first time (which imports) left out. Medians, with
their 95 % intervals; the modules of both are compiled beforehand, as pip leaves them.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import gradwatch
from tests.benchmarks import tables
from tests.benchmarks.interleave import BOOTSTRAP
from tests.benchmarks.versions import ROOT

Floats = NDArray[np.float64]

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
"""
UNDER = ("-m", "gradwatch", "run", "--quiet", "--listen", "127.0.0.1:0", "--", sys.executable)
PARAMETERS = 1_000


def start(watched: bool) -> tuple[float, float]:
    """Seconds of CPU and of the clock that the script takes, from its start to its end."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *(UNDER if watched else ()), "-c", SCRIPT]
    with tempfile.TemporaryDirectory() as folder:
        began, before = time.perf_counter(), os.times()
        subprocess.run(words, cwd=folder, env=environ, check=True)
        ended, after = time.perf_counter(), os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return cpu, ended - began


def starts(rounds: int) -> Floats:
    """[rounds, 2, 2]: bare and watched, in turns, and of each CPU and clock in seconds."""
    taken = [
        [start(watched) for watched in ((False, True), (True, False))[turn % 2]] for turn in range(rounds)
    ]
    return np.array([pair[:: 1 - 2 * (turn % 2)] for turn, pair in enumerate(taken)])


def attaching(times: int, cpu: bool = False, parameters: int = PARAMETERS) -> Floats:
    """[times, 2]: seconds that `watch` and `close` take in this process, once everything is imported."""
    clock = time.thread_time if cpu else time.perf_counter
    torch.set_num_threads(1)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for run in range(times + 1):
            model = nn.ModuleList(nn.Linear(4, 4) for _ in range(parameters // 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            began = clock()
            watch = gradwatch.watch(model, optimizer, run_dir=folder, run_id=str(run), listen="127.0.0.1:0")
            attached = clock()
            for _ in range(3):
                optimizer.zero_grad()
                torch.stack([part(torch.ones(4)).sum() for part in model]).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained = clock()
            watch.close()
            taken.append((attached - began, clock() - trained))
    return np.array(taken[1:])


def interval(values: Floats) -> str:
    """The median of milliseconds, and its 95 % interval."""
    picks = np.random.default_rng(0).integers(len(values), size=(BOOTSTRAP, len(values)))
    low, high = np.percentile(np.median(values[picks], 1), (2.5, 97.5))
    return f"{np.median(values):.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="starts of each (default 15)")
    parser.add_argument("--times", type=int, default=15, help="watches of 1,000 parameters (default 15)")
    arguments = parser.parse_args()
    compileall.compile_dir(Path(ROOT, "gradwatch"), quiet=1)
    start(False), start(True)  # files that are read for the first time
    found = starts(arguments.rounds) * 1e3
    given = [f"{arguments.times}, cpu={cpu}" for cpu in (True, False)]
    script = "from tests.benchmarks.start import attaching; print(attaching({}).tolist())"
    watches = [np.array(json.loads(_python(script.format(one)))) * 1e3 for one in given]
    rows = [["", "CPU, ms", "clock, ms"]]
    rows.append(["the script by itself", *(interval(found[:, 0, kind]) for kind in (0, 1))])
    rows.append(
        ["`gradwatch run` adds", *(interval(found[:, 1, kind] - found[:, 0, kind]) for kind in (0, 1))]
    )
    rows.append([f"`watch`, {PARAMETERS:,} parameters", *(interval(one[:, 0]) for one in watches)])
    rows.append(["`close`", *(interval(one[:, 1]) for one in watches)])
    print(f"{tables.as_markdown(rows)}\n\n{tables.machine(1)}, {arguments.rounds} rounds")


def _python(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
