"""P11 and P14: few threads, few descriptors, no growth, no network, and a start that asks nobody anything."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from tests.support import warm


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_threads_and_descriptors_are_bounded(tmp_path: Path) -> None:
    """At most two threads and eight descriptors while watching; none of either after close."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    threads, fds = threading.active_count(), descriptors()
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen="127.0.0.1:0", strict=True) as gw:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert gw.flush()
        assert threading.active_count() - threads <= 2
        assert descriptors() - fds <= 8
    assert threading.active_count() == threads
    assert descriptors() == fds


START = """
import json, sys
import torch
events = []
sys.addaudithook(lambda name, args: events.append(name) if name.startswith("socket.") else None)
import gradwatch
model = torch.nn.Linear(4, 4); optimizer = torch.optim.SGD(model.parameters(), 0.1)
with gradwatch.watch(model, optimizer, run_dir=sys.argv[1], listen="127.0.0.1:0"):
    for _ in range(3):
        optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
print(json.dumps(sorted(set(events))))
"""


def test_start_makes_no_connection_and_resolves_no_name(tmp_path: Path) -> None:
    """Attaching, watching and closing never connect anywhere and never ask a resolver (it may hang for seconds)."""
    done = warm.run([sys.executable, "-c", START, str(tmp_path)], check=True)
    used = json.loads(done.stdout)
    forbidden = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.getnameinfo")
    assert not [name for name in used if name in forbidden]
    assert "socket.bind" in used  # the audit hook really sees the endpoint


GROWTH = """
import os, sys, time
import torch, gradwatch
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
x = torch.ones(2, 8)
steps = int(sys.argv[2])
hanging, fdatasync = [False], os.fdatasync
def slow(fd):
    while hanging[0]:
        time.sleep(0.01)
    fdatasync(fd)
os.fdatasync = slow
with gradwatch.watch(model, optimizer, run_dir=sys.argv[1], listen="127.0.0.1:0", strict=True) as gw:
    for step in range(steps):
        optimizer.zero_grad()
        # Healthy but for one step in a hundred: both ways through a step are taken often.
        (model(x).square().mean() * (float("nan") if step % 100 == 99 else 1.0)).backward()
        optimizer.step()
        # What waits for a slow disk is bounded, and no growth: the queue is full once before anything is measured.
        if step == 200:
            hanging[0] = True
            gw.flush(timeout=0.01)
        if step == 1400:
            hanging[0] = False
        if step % 1000 == 0 and not hanging[0]:
            gw.flush()
        if step == steps // 2:
            before = resident()
    gw.flush(); print(resident() - before)
    (dropped,) = [sink.sink.dropped for sink in gw._session._sinks if sink.name == "journal"]
    assert dropped, "the queue was never full"
"""


def grown(tmp_path: Path, steps: int) -> int:
    command = [sys.executable, "-c", GROWTH, str(tmp_path), str(steps)]
    done = warm.run(command, check=True, timeout=3600)
    return int(done.stdout)


def test_memory_does_not_grow(tmp_path: Path) -> None:
    """The second half of 3,200 steps under the whole default watch adds less than 1 MiB."""
    assert grown(tmp_path, 3_200) < 1 << 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_in_a_long_run(tmp_path: Path) -> None:
    """P11 in full: less than 1 MiB over 100,000 steps after as many to warm up."""
    assert grown(tmp_path, 200_000) < 1 << 20
