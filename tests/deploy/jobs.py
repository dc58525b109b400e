"""Training jobs for the shows: an unmodified script under `gradwatch run`, told what to do by files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support import warm

RULES = """
version: 1
extends: [default]
sinks:
  - prometheus: {listen: "127.0.0.1:0", stall_seconds: 3}
  - journal
  - log
"""
SCRIPT = """
import os, pathlib, sys, time
import torch
folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
rank = int(os.environ.get("RANK", 0))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
poisoned = False
for step in range(100000):
    # Every rank must see the same word, or one would wait for the other in its last step.
    enough = torch.tensor(float((folder / "enough").exists()))
    if "RANK" in os.environ:
        torch.distributed.broadcast(enough, 0)
    if enough:
        break
    x = torch.randn(16, 8)
    if (folder / "poison").exists() and not poisoned:
        poisoned = True
        x[3, 2] = float("nan")
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    while (folder / "hang").exists():
        time.sleep(0.1)
    time.sleep(0.1)
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
assert all(parameter.isfinite().all() for parameter in model.parameters())
"""


class Job:
    """A running job; `tell` makes the file that its script looks for."""

    def __init__(self, folder: Path, process: warm.Process) -> None:
        self.folder, self._process = folder, process

    def tell(self, word: str) -> None:
        """poison (once), hang, enough."""
        (self.folder / word).touch()

    def ended(self) -> tuple[int, str, str]:
        """(exit status, stdout, stderr), once it has ended by itself."""
        return self._process.communicate(120)

    def end(self) -> str:
        """Let it finish; its stderr. It must have exited with 0."""
        self.tell("enough")
        status, out, err = self.ended()
        assert status == 0, out + err
        return err

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


@contextmanager
def job(
    folder: Path, run_id: str, rules: Path | str, *options: str, program: Sequence[str] = (sys.executable,)
) -> Iterator[Job]:
    """`gradwatch run OPTIONS -- PROGRAM train.py FOLDER`, its journals under FOLDER/runs."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "gradwatch", "run", "--rules", str(rules), "--run-id", run_id]
    where = ["--dir", str(folder.parent / "runs"), *options]
    script = [*program, str(folder / "train.py"), str(folder)]
    one = Job(folder, warm.Process([*run, *where, "--", *script]))
    try:
        yield one
    finally:
        one.tell("enough")  # torchrun gives its workers sessions of their own: no signal of ours reaches them
        (folder / "hang").unlink(missing_ok=True)
        one.kill()
        one.ended()


def torchrun(ranks: int) -> tuple[str, ...]:
    """What stands before the script."""
    return (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    )
