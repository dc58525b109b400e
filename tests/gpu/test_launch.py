"""`gradwatch run` around an unmodified script that trains on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.journal import read_journal
from tests.localise.test_in_the_loop import SCRIPT as ON_HOST
from tests.support.launch_cases import GRADWATCH

SCRIPT = ON_HOST.replace("net = Net()", "net = Net().cuda()").replace(
    "torch.randn(32, 4)", 'torch.randn(32, 4, device="cuda")'
)


@pytest.mark.parametrize("fault", [None, 40])
def test_an_unmodified_script(fault: int | None, tmp_path: Path) -> None:
    """Healthy: the same output as bare. With a NaN at step 40: skipped, its cause found with the script's own line."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT if fault else SCRIPT.replace("step == 40", "False"))
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
