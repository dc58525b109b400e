"""The fleet that is drawn: real jobs under `gradwatch run`, with what goes wrong in real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.jobs import torchrun

RULES = """
version: 1
extends: [default]
clip:
  total: {method: baseline, above: 6}
rules:
  spike-in-shadow:
    detect: {kind: nonfinite, of: norm, values: [nan, inf]}
    for: 1
    severity: info
    optional: true
    mode: shadow
    do: [skip_step]
sinks:
  - prometheus: {listen: "127.0.0.1:0", stall_seconds: 20}
  - journal
  - log
"""
SCRIPT = """
import os, pathlib, sys, time
import torch
folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_num_threads(1)
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.blocks = torch.nn.ModuleList(Block(32) for _ in range(4))
        self.head = torch.nn.Linear(32, 64)
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
model = Model()
ranks = "RANK" in os.environ
if ranks:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=200, enabled=ranks)
for step in range(100000):
    enough = torch.tensor(float((folder / "enough").exists()))
    if ranks:
        torch.distributed.broadcast(enough, 0)
    if enough:
        break
    tokens = torch.randint(0, 64, (16, 32))
    optimizer.zero_grad()
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), (tokens[:, 1:] % 7).flatten())
    if kind == "faulty":
        loss = loss * (30.0 if step % 90 == 60 else float("nan") if step % 400 in (300, 301) else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if kind == "hanging" and step == 600:
        time.sleep(3600)
    time.sleep(0.03)
if ranks:
    torch.distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class Plan:
    """A job of the fleet: faulty, healthy or hanging; ended or killed `after` so many seconds, else at the end."""

    run_id: str
    kind: str
    ranks: int = 1
    after: float | None = None
    killed: bool = False


FLEET = (
    Plan("lm-small-bf16", "faulty", ranks=2),
    Plan("lm-small-lr1e-3", "healthy"),
    Plan("lm-base-hangs", "hanging"),
    Plan("lm-tiny", "healthy", after=40),
    Plan("lm-tiny-preempted", "faulty", after=50, killed=True),
)


def started(folder: Path, plan: Plan, rules: Path, targets: Path) -> subprocess.Popen[bytes]:
    """The job, in a session of its own."""
    place = folder / plan.run_id
    place.mkdir()
    (place / "train.py").write_text(SCRIPT)
    program: Sequence[str] = torchrun(plan.ranks) if plan.ranks > 1 else (sys.executable,)
    run = [sys.executable, "-m", "gradwatch", "run", "--rules", str(rules), "--run-id", plan.run_id]
    where = ["--dir", str(folder / "runs"), "--file-sd", str(targets)]
    with (place / "log").open("wb") as log:
        return subprocess.Popen(
            [*run, *where, "--", *program, str(place / "train.py"), str(place), plan.kind],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@contextmanager
def fleet(folder: Path, targets: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All jobs of FLEET, by run; every one of them gone at the end."""
    rules = folder / "fleet.gradwatch.yaml"
    rules.write_text(RULES)
    with ExitStack() as gone:
        jobs = {}
        for plan in FLEET:
            jobs[plan.run_id] = started(folder, plan, rules, targets)
            gone.callback(end, folder, plan, jobs[plan.run_id], True)
        yield jobs


def end(folder: Path, plan: Plan, job: subprocess.Popen[bytes], at_once: bool = False) -> None:
    """Let it finish, or kill it as its plan says; `at_once` where it must be gone whatever it does."""
    (folder / plan.run_id / "enough").touch()
    if plan.killed and job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
    try:
        job.wait(20)
    except subprocess.TimeoutExpired:
        if not at_once:
            raise
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
