"""P31: a process that is stopped for a while and clocks that jump are no fault of the training's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.journal import EventsEntry, JournalReader, StepsEntry
from tests.support.launch_cases import GRADWATCH

TRAIN = """
import pathlib, torch
torch.manual_seed(0); torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
x = torch.randn(64, 8)
step = 0
while not pathlib.Path("enough").exists():
    optimizer.zero_grad()
    model(x + 0.1 * torch.randn(64, 8)).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 50 == 0:
        pathlib.Path("count").write_text(str(step))
"""


def steps_and_events(run: Path) -> tuple[int, list[str]]:
    """Steps recorded, and the rules of all transitions but of those that wait."""
    (path,) = run.rglob("*.gwj")
    entries = list(JournalReader(path).entries())
    steps = sum(len(one.rows) for one in entries if isinstance(one, StepsEntry))
    events = [e for one in entries if isinstance(one, EventsEntry) for e in one.events if e.kind != "pending"]
    return steps, [f"{event.kind} {event.rule}" for event in events]


def test_a_process_that_is_stopped_for_seconds_has_no_incident(tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT, three times, in the midst of its steps: every step recorded, nothing told, exit 0."""
    (tmp_path / "x.py").write_text(TRAIN)
    words = [*GRADWATCH, "run", "--listen", "127.0.0.1:0", "--", sys.executable, "x.py"]
    job = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    count = tmp_path / "count"

    def reaches(more: int) -> None:
        began = int(count.read_text() or 0) if count.exists() else 0
        deadline = time.monotonic() + 120
        while not (count.exists() and int(count.read_text() or 0) >= began + more):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)

    try:
        for pause in (1.5, 0.3, 2.5):
            reaches(150)
            os.kill(job.pid, signal.SIGSTOP)
            time.sleep(pause)
            os.kill(job.pid, signal.SIGCONT)
        reaches(150)
        (tmp_path / "enough").touch()
        _, said = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, said
    steps, events = steps_and_events(tmp_path)
    assert events == []
    assert f"{steps:,} of {steps:,} steps watched" in said
    assert "no rule fired" in said


def test_a_wall_clock_that_jumps_has_no_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back and forth, between two steps: nothing is told, and no step is lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    jumps = {60: -1e7, 80: -1.5, 100: 3600.0, 120: 1e7, 140: 0.0}
    offset, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + offset[0]) * 1e9))
    x = torch.randn(64, 8)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen="127.0.0.1:0", strict=True) as watch:
        for step in range(160):
            offset[0] = jumps.get(step, offset[0])
            optimizer.zero_grad()
            model(x + 0.1 * torch.randn(64, 8)).square().mean().backward()
            optimizer.step()
        status = watch.status()
    assert steps_and_events(tmp_path) == (160, [])
    assert watch.health.errors() == {}
    assert status["firing"] == []
