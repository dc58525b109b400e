"""What promises say in seconds, measured: on a machine with nothing else to do (`pytest -m bench`)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from tests.benchmarks import endpoint, start
from tests.benchmarks.versions import ROOT

Record = Callable[[str, object], None]
pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

FIRST_USE = """
import time
import torch
from torch import nn
model = nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 0.1)
began = time.perf_counter()
import gradwatch
gradwatch.watch(model, optimizer, run_dir=RUNS, listen="127.0.0.1:0")
print(time.perf_counter() - began)
"""


def python(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout


def test_a_first_watch_starts_quickly(tmp_path: Path, record_property: Record) -> None:
    """P14: import and first watch within 300 ms after torch is imported; at 1,000 parameters 50 ms, once imported."""
    took = [float(python(FIRST_USE.replace("RUNS", repr(str(tmp_path / str(n)))))) for n in range(9)]
    watches = json.loads(
        python("from tests.benchmarks.start import attaching; print(attaching(15).tolist())")
    )
    attach = statistics.median(one[0] for one in watches)
    first = statistics.median(took[1:])
    record_property(
        "seen", f"first watch {first * 1e3:.0f} ms, attach {attach * 1e3:.0f} ms at {start.PARAMETERS:,}"
    )
    assert first < 0.300
    assert attach <= 0.050


def test_closing_takes_little_time(record_property: Record) -> None:
    """P8: at 1,000 parameters, median of 15."""
    watches = json.loads(
        python("from tests.benchmarks.start import attaching; print(attaching(15).tolist())")
    )
    close = statistics.median(one[1] for one in watches)
    record_property("seen", f"close {close * 1e3:.0f} ms")
    assert close <= 0.050


def hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every fdatasync hang for good."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: time.sleep(3600))


def test_closing_beside_a_hung_disk_takes_two_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """P8: the journal has no end then, which is said."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gradwatch.watch(model, optimizer, run_dir=tmp_path, listen="127.0.0.1:0")
    model(torch.ones(2, 4)).sum().backward()
    hung(monkeypatch)
    optimizer.step()
    began = time.perf_counter()
    watch.close()
    took = time.perf_counter() - began
    record_property("seen", f"beside a hung disk {took:.2f} s")
    assert watch.health.errors().get("journal") == 1
    assert took <= 2.0


def test_a_hung_disk_adds_less_than_a_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """P20: a step while the disk hangs, against one while it does not, in turns of ten; medians."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, real, hanging = torch.randn(32, 64), os.fdatasync, [False]

    def slow(fd: int) -> None:
        while hanging[0]:
            time.sleep(0.001)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    took: dict[bool, list[float]] = {True: [], False: []}
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen="127.0.0.1:0") as watch:
        for turn in range(200):
            hanging[0] = turn % 2 == 1
            if hanging[0]:
                watch.flush(timeout=0.001)  # so that a write is under way
            for _ in range(10):
                began = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                took[hanging[0]].append(time.perf_counter() - began)
        hanging[0] = False
    added = statistics.median(took[True]) - statistics.median(took[False])
    record_property("seen", f"{added * 1e6:+.0f} us a step")
    assert added < 1e-3


@pytest.mark.parametrize("kind", endpoint.KINDS)
def test_attacks_on_the_endpoint_slow_no_step(kind: str, record_property: Record) -> None:
    """P13: of the steps beside the same load aimed elsewhere, median of neighbouring slices."""
    found = endpoint.measure(kind, 5.0, 9)
    mine, theirs = found["endpoint"], found["elsewhere"]
    compared = endpoint.Compared(
        [one.steps_per_second for one in mine], [one.steps_per_second for one in theirs]
    )
    slowest = max(one.scrape_seconds for one in mine)
    record_property("seen", f"{kind} {compared.paired:.3f}, scrape {slowest:.2f} s")
    assert compared.paired >= 0.95
    assert slowest <= 6.0
    assert sum(one.failed for one in mine) == 0
