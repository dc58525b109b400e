"""Threads that train while a watch is being made: one watch, whole before the first step it sees."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from torch import nn

import gradwatch
from gradwatch.journal import read_journal
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.internal_errors import Health
from tests.support import warm
from tests.support.kept import Kept
from tests.support.launch_cases import GRADWATCH

THREADS, STEPS = 4, 20
SCRIPT = f"""
import threading, torch
torch.set_num_threads(1)
models = [torch.nn.Linear(4, 1) for _ in range({THREADS})]
optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
together = threading.Barrier({THREADS})

def train(model, optimizer):
    together.wait()
    for _ in range({STEPS}):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

threads = [threading.Thread(target=train, args=pair) for pair in zip(models, optimizers)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


class StepsMeanwhile(Kept):
    """A sink during whose opening another thread steps the watched optimizer."""

    def __init__(self, step: threading.Thread) -> None:
        super().__init__()
        self._step = step
        self.early = 0
        self.opened = 0

    def open(self, run: RunInfo, health: Health) -> None:
        super().open(run, health)
        self.opened += 1
        if self.opened == 1:
            self._step.start()
            self._step.join()
        self.early = len(self.records)


def test_no_step_is_told_to_a_sink_that_is_being_opened() -> None:
    """A step taken meanwhile by another thread is not seen; it must not open the sink a second time."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    sink = StepsMeanwhile(threading.Thread(target=step))
    with gradwatch.watch(model, optimizer, rules="observe-only", sinks=[sink]) as gw:
        assert (sink.opened, sink.early) == (1, 0)
        step()
        gw.flush()
        assert (len(sink.records), gw.health.errors()) == (1, {})


def test_threads_that_start_together_share_one_watch(tmp_path: Path) -> None:
    """Under `gradwatch run` the first steps of four threads come at once: one run, one sound journal, no fault."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--dir", "runs", "--run-id", "r", "--listen", "127.0.0.1:0"]
    done = warm.run([*GRADWATCH, "run", "--quiet", *options, "--", sys.executable, "train.py"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (journal,) = read_journal(tmp_path / "runs" / "r")
    steps = [(step.record.snapshot.optimizer, step.record.snapshot.step) for step in journal.records()]
    assert (journal.complete, journal.damage) == (True, [])
    assert sorted(steps) == [(captured, step) for captured in range(THREADS) for step in range(STEPS)]
