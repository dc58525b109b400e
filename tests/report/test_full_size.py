"""A run of 1,000 parameters × 100,000 steps: its report in 10 s, 20 MB of page, 1 GiB of memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradwatch.records.record import Record
from tests.report.runs import finished, recorded
from tests.support.sink_records import make_record, make_sites

MEASURED = """
import re, sys, time
from gradwatch.cli import main
status = main(["report", sys.argv[1], "-o", sys.argv[2]])
# Not ru_maxrss: a child begins with what its parent had.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(status, time.process_time(), peak / 2**20)
"""


def long_run(parameters: int, count: int) -> Iterator[Record]:
    """Norms of every parameter that scatter, a spike of one at one step in the middle."""
    sites = make_sites(names=[f"model.layers.{at // 10}.block.{at % 10}.weight" for at in range(parameters)])
    random = np.random.default_rng(0)
    noise = np.exp(0.3 * random.normal(size=(997, parameters))).astype(np.float32)
    for step in range(count):
        norm = noise[step % 997].copy()
        if step == count // 2 + 1:
            norm[parameters // 2] = 12345.0
        yield make_record(sites, norm, step=step, applied=0.7, scalars={"loss": 5 / (1 + step / 1000)})


@pytest.mark.parametrize(
    ("parameters", "count", "seconds"),
    [(200, 2000, math.inf), pytest.param(1000, 100_000, 10.0, marks=pytest.mark.soak)],
)
def test_long_runs(parameters: int, count: int, seconds: float, tmp_path: Path) -> None:
    """CPU seconds on one core (at full size), memory and the size of the page stay within their bounds."""
    run = recorded(tmp_path, long_run(parameters, count), account=finished(count))
    out = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(run), str(out)], capture_output=True, text=True, check=True
    )
    status, taken, memory = map(float, done.stdout.splitlines()[-1].split())
    print(f"{taken:.1f} s, {memory:.2f} GiB, {out.stat().st_size / 1e6:.1f} MB")
    assert status == 0
    assert taken <= seconds
    assert memory <= 1
    assert out.stat().st_size <= 20e6
    assert '"high_step":' in out.read_text(encoding="utf-8")
    assert "12345" in out.read_text(encoding="utf-8")
