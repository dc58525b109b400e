"""What attacks on the endpoint cost training: `python -m tests.benchmarks.endpoint [--seconds S] [--rounds N]`.

A real script under `gradwatch run`, with `ulimit -n 256` and a checkpoint saved every 20 steps, is attacked at its
own endpoint and, in turns, somewhere else (an equal endpoint in a process of its own): the same load on the machine,
the difference is what the endpoint lets through. Promise P13: at least 95 % of the steps, every checkpoint saved, an
honest scrape served within 6 s.

`--apart` puts the job alone on the first core, at the highest priority, and all else on the others: the endpoint takes
whatever it takes from the job. Without, it wants two idle cores, or many short rounds: `ratio` is that of the medians,
`paired` the median of the ratios of neighbouring slices, which forgets what the machine did in the meantime. The
endpoint may use 1 % of a core, more than 1 % of a job that gets less than one: the last ratio is of steps per second of
the CPU time of the job itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
import io, mmap, pathlib, resource, struct, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import torch
torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
(folder / "count").write_bytes(bytes(24))
with (folder / "count").open("r+b") as file, mmap.mmap(file.fileno(), 24) as count:
    step = saved = failed = 0
    while not (folder / "enough").exists():
        optimizer.zero_grad()
        model(torch.randn(64, 256)).pow(2).mean().backward()
        optimizer.step()
        step += 1
        if step % 20 == 0:
            try:
                torch.save(model.state_dict(), folder / "checkpoint.pt")
                saved += 1
            except Exception:
                failed += 1
        count[:] = struct.pack("qqq", step, saved, failed)
"""
DECOY = """
import sys, urllib.request
from gradwatch.endpoint.http_protocol import Content
from gradwatch.endpoint.address import Address
from gradwatch.endpoint.listening_port import listening_socket
from gradwatch.endpoint.http_server import Endpoint
with urllib.request.urlopen(sys.argv[1], timeout=30) as response:
    body = Content(response.headers["Content-Type"], response.read())
served = Endpoint(listening_socket(Address("127.0.0.1", 0)), {"/metrics": lambda hurried: body}, print)
served.start()
print(served.address.port, flush=True)
sys.stdin.read()
"""
ATTACKER = """
import socket, sys, threading, time
kind, port = sys.argv[1], int(sys.argv[2])
GET = b"GET /metrics HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n"
def flood():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 2) as peer:
                peer.sendall(GET)
                while peer.recv(65536): pass
        except OSError: time.sleep(0.001)
def malformed():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 2) as peer:
                peer.sendall(b"\\x16\\x03\\x01 no HTTP at all\\r\\n\\r\\n")
                while peer.recv(65536): pass
        except OSError: time.sleep(0.001)
def slowloris():
    held = []
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port), 2)
            peer.sendall(GET[:20])
            held.append(peer)
        except OSError: pass
        if len(held) >= 100: held.pop(0).close()
        time.sleep(0.002)
def silent():
    held = []
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port), 2)
            peer.sendall(GET)
            held.append(peer)
        except OSError: pass
        if len(held) >= 200: held.pop(0).close()
        time.sleep(0.002)
count = 8 if kind in ("flood", "malformed") else 5
threads = [threading.Thread(target=globals()[kind], daemon=True) for _ in range(count)]
for thread in threads: thread.start()
time.sleep(3600)
"""
KINDS = ("flood", "malformed", "slowloris", "silent")


@dataclass(frozen=True)
class Slice:
    """What happened while one attack lasted; `scrape_seconds` is how long the honest scrape took."""

    steps_per_second: float
    steps_per_cpu_second: float
    saved: int
    failed: int
    scrape_seconds: float


class Job:
    """A training script under `gradwatch run`, its counters and its endpoint."""

    def __init__(self, folder: Path, apart: bool = False) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        run = [sys.executable, "-m", "gradwatch", "run", "--dir", str(folder / "runs"), "--run-id", "job"]
        script = ["--listen", "127.0.0.1:0", "--", sys.executable, str(folder / "train.py"), str(folder)]
        self.process = subprocess.Popen(
            [*run, *script],
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=alone if apart else None,
        )
        endpoint = folder / "runs" / "job" / "endpoint-rank0.json"
        while not endpoint.exists():
            if self.process.poll() is not None:
                raise RuntimeError((self.process.stderr.read() if self.process.stderr else b"").decode())
            time.sleep(0.05)
        self.url = str(json.loads(endpoint.read_text(encoding="utf-8"))["url"])
        self.port = int(json.loads(endpoint.read_text(encoding="utf-8"))["port"])

    def counts(self) -> tuple[int, int, int]:
        """Steps taken, checkpoints saved, and those that could not be."""
        found: tuple[int, int, int] = struct.unpack("qqq", (self.folder / "count").read_bytes())
        return found

    def cpu_seconds(self) -> float:
        """CPU time of all threads of the job, which `gradwatch run` has become."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> int:
        """Let it finish; its exit status."""
        (self.folder / "enough").touch()
        self.process.communicate(timeout=60)
        return self.process.returncode


def alone() -> None:
    """On the first core, before everybody else there; needs the right to do so."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.nice(-20)


def elsewhere() -> None:
    """On any core but the first."""
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {min(os.sched_getaffinity(0))})


@contextmanager
def decoy(url: str, apart: bool = False) -> Iterator[int]:
    """An endpoint of its own process that serves the page at `url` as it was; its port."""
    with subprocess.Popen(
        [sys.executable, "-c", DECOY, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=elsewhere if apart else None,
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def attacked(job: Job, kind: str, port: int, seconds: float, apart: bool = False) -> Slice:
    """`seconds` of an attack on `port`, after half a second in which it gets going."""
    with subprocess.Popen(
        [sys.executable, "-c", ATTACKER, kind, str(port)], preexec_fn=elsewhere if apart else None
    ) as attacker:
        try:
            time.sleep(0.5)
            before, used, began = job.counts(), job.cpu_seconds(), time.monotonic()
            time.sleep(seconds / 2)
            asked = time.monotonic()
            with urllib.request.urlopen(job.url, timeout=30) as response:
                assert b"gradwatch_steps_total" in response.read()
            took = time.monotonic() - asked
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            after, used, elapsed = job.counts(), job.cpu_seconds() - used, time.monotonic() - began
        finally:
            attacker.kill()
    steps, saved, failed = (b - a for a, b in zip(before, after, strict=True))
    return Slice(steps / elapsed, steps / used, saved, failed, took)


def measure(kind: str, seconds: float, rounds: int, apart: bool = False) -> dict[str, list[Slice]]:
    """Attacks in turns on the job and elsewhere, the order reversed every round."""
    found: dict[str, list[Slice]] = {"endpoint": [], "elsewhere": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = Job(Path(folder), apart)
        try:
            ports = {"endpoint": job.port, "elsewhere": stack.enter_context(decoy(job.url, apart))}
            for number in range(rounds):
                for where in ("endpoint", "elsewhere") if number % 2 else ("elsewhere", "endpoint"):
                    found[where].append(attacked(job, kind, ports[where], seconds, apart))
        finally:
            status = job.end()
        if status:
            raise RuntimeError(f"the script exited with {status}")
    return found


def main() -> None:
    """Print a table, one row per attack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--apart", action="store_true")
    chosen = parser.parse_args()
    print(
        f"{'attack':>10} {'steps/s':>8} {'ratio':>6} {'paired':>6} {'/CPU s':>6}"
        f" {'saved':>6} {'failed':>6} {'scrape s':>9}"
    )
    for kind in chosen.kinds:
        found = measure(kind, chosen.seconds, chosen.rounds, chosen.apart)
        mine, theirs = found["endpoint"], found["elsewhere"]
        ours = [each.steps_per_second for each in mine]
        steps = Compared(ours, [each.steps_per_second for each in theirs])
        cpu = Compared(
            [each.steps_per_cpu_second for each in mine], [each.steps_per_cpu_second for each in theirs]
        )
        print(
            f"{kind:>10} {statistics.median(ours):8.1f} {steps.of_medians:6.3f} {steps.paired:6.3f} {cpu.paired:6.3f}"
            f" {sum(each.saved for each in mine):6} {sum(each.failed for each in mine):6}"
            f" {max(each.scrape_seconds for each in mine):9.2f}",
            flush=True,
        )


@dataclass(frozen=True)
class Compared:
    """Rates at the endpoint and elsewhere, slice by slice."""

    mine: list[float]
    theirs: list[float]

    @property
    def of_medians(self) -> float:
        return statistics.median(self.mine) / statistics.median(self.theirs)

    @property
    def paired(self) -> float:
        return statistics.median(a / b for a, b in zip(self.mine, self.theirs, strict=True))


if __name__ == "__main__":
    main()
