"""The end of a selftest: by a signal, by its clock; no process and no folder is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch_cases import GRADWATCH

TRAIN = """import os, time, torch
from torch import nn
if "RANK" in os.environ: torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
if "RANK" in os.environ: model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    print("step", flush=True)
    time.sleep(0.1)
"""
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _start(folder: Path, *options: str, launch: list[str]) -> subprocess.Popen[str]:
    (folder / "cwd").mkdir()
    (folder / "tmp").mkdir()
    (folder / "cwd" / "train.py").write_text(TRAIN)
    return subprocess.Popen(
        [*GRADWATCH, "selftest", *options, "--", *launch, "train.py"],
        cwd=folder / "cwd",
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _has_stepped(folder: Path) -> bool:
    return any("step" in path.read_text() for path in (folder / "tmp").glob("gradwatch-selftest-*/output"))


def _assert_nothing_is_left(folder: Path) -> None:
    assert list((folder / "tmp").glob("gradwatch-selftest-*")) == []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        assert f"GRADWATCH_DIR={folder / 'tmp'}".encode() not in environment


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.soak)])
def test_a_signal_ends_the_training_with_it(tmp_path: Path, number: signal.Signals) -> None:
    """All ranks of a launcher, and the copy of the folder."""
    selftest = _start(tmp_path, launch=RANKS)
    deadline = time.monotonic() + 120
    while not _has_stepped(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    selftest.send_signal(number)
    selftest.communicate(timeout=60)
    assert selftest.returncode == 128 + number
    _assert_nothing_is_left(tmp_path)


@pytest.mark.soak
def test_the_clock_ends_all_ranks(tmp_path: Path) -> None:
    """That is said, with the option that gives more time."""
    selftest = _start(tmp_path, "--seconds", "3", launch=RANKS)
    out, err = selftest.communicate(timeout=120)
    assert selftest.returncode == 1, out + err
    assert "the 3 s there were ended after about" in out
    assert "give more, --seconds 12" in out
    assert "the script ended" not in out
    _assert_nothing_is_left(tmp_path)


@pytest.mark.soak
def test_the_clock_ends_a_process_within_a_fault(tmp_path: Path) -> None:
    """The fault has no end then: what is said is the clock."""
    (tmp_path / "rules.yaml").write_text(
        "version: 1\nrules:\n  bad: {detect: {kind: nonfinite}, do: [skip_step]}\n"
    )
    selftest = _start(
        tmp_path, "--seconds", "15", "--rules", str(tmp_path / "rules.yaml"), launch=[sys.executable]
    )
    out, err = selftest.communicate(timeout=120)
    assert "the 15 s there were ended while it lasted" in out, out + err
    _assert_nothing_is_left(tmp_path)
