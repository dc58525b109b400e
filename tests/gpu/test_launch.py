"""`gradwatch run` around an unmodified script that trains on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.journal import read_journal
from tests.support.launch_cases import GRADWATCH

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if BAD is not None and x[0, 0] > 100:
            h = h + torch.sqrt((h - h).square())  # here
        return self.b(h)


BAD = FAULT
net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters(), 2e-2)
for step in range(120):
    x = torch.randn(32, 4, device="cuda")
    y = x.sum(-1, keepdim=True)
    if step == BAD:
        x[0, 0] = 101.0
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
"""


@pytest.mark.parametrize("fault", [None, 40])
def test_an_unmodified_script(fault: int | None, tmp_path: Path) -> None:
    """Healthy: the same output as bare. With a NaN at step 40: skipped, its cause found with the script's own line."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FAULT", str(fault)))
    runs = []
    for launcher in ([], [*GRADWATCH, "run", "--dir", str(tmp_path / "runs"), "--"]):
        command = [*launcher, sys.executable, str(script)]
        runs.append(
            subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        )
    bare, watched = runs
    assert bare.returncode == watched.returncode == 0, watched.stderr
    assert "120 of 120" in watched.stderr, watched.stderr
    (head,) = (tmp_path / "runs").rglob("*.gwj")
    (journal,) = read_journal(head)
    if fault is None:
        assert watched.stdout == bare.stdout
        assert not list(journal.findings())
        return
    assert "nan" in bare.stdout
    assert float(watched.stdout.split()[1]) < 0.3, watched.stdout
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith("# here"))
    (finding,) = journal.findings()
    assert (finding.step, finding.op, finding.where) == (40, "sqrt", f"{script}:{line}")
