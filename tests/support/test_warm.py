"""A process forked from a warm Python is told apart from a fresh one by nothing that these scripts can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launch_cases import TRAIN

SHOW = """
import atexit, os, random, sys, signal, threading
print(sys.argv, sys.path, __name__, __file__, sorted(os.environ), os.getcwd(), input(), random.__name__)
print([signal.getsignal(each) for each in (2, 15)], threading.active_count())
atexit.register(print, "left")
threading.Thread(target=lambda: [threading.main_thread().join(), print("late")]).start()
"""
ENDS = {
    "end": TRAIN + "import warnings\nprint([each[:3] for each in warnings.filters], torch.rand(1))",
    "status": "sys.exit(3)",
    "message": "sys.exit('no')",
    "exception": "def f():\n    raise ValueError('no')\ntry:\n    1 / 0\nexcept Exception:\n    f()",
    "ctrl-c": "os.kill(os.getpid(), 2)\nimport time\ntime.sleep(5)",
    "killed": "print(end='', flush=True)\nos.kill(os.getpid(), 15)\ntime.sleep(5)",
}


def test_a_warm_script_is_a_fresh_one(tmp_path: Path) -> None:
    """Streams, exit status, tracebacks, what it sees of itself and the weights it ends with, however it ends."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWATCH", "PYTHON"))}
    environ = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": "here:there"}
    for end, text in ENDS.items():
        (tmp_path / "x.py").write_text(SHOW + text)
        command = [sys.executable, "x.py", "--a", "b"]
        fresh = subprocess.run(
            command, cwd=tmp_path, env=environ, input="in\n", capture_output=True, text=True
        )
        other = warm.run(command, tmp_path, environ, "in\n")
        assert (other.returncode, other.stdout, other.stderr) == (
            fresh.returncode,
            fresh.stdout,
            fresh.stderr,
        ), end


def test_a_script_that_hangs_is_killed(tmp_path: Path) -> None:
    """The time given is the longest that a test waits."""
    with pytest.raises(TimeoutError):
        warm.run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, os.environ, timeout=0.3)
