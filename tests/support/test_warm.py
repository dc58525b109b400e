"""A process forked from a warm Python is told apart from a fresh one by nothing that these scripts can see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launch_cases import TRAIN

SHOW = """
import atexit, os, random, sys, signal, threading
print(sys.argv, sys.orig_argv, sys.path, __name__, __file__, sorted(os.environ), os.getcwd(), input(), random.__name__)
print([signal.getsignal(each) for each in (2, 15)], threading.active_count())
atexit.register(print, "left")
threading.Thread(target=lambda: [threading.main_thread().join(), print("late")]).start()
"""
CHILDREN = """
import multiprocessing, os, subprocess, sys
def seen(said):
    return said, os.getppid() == parent, sys.argv, sys.path, sorted(os.environ), __name__
parent = int(os.environ.setdefault("PARENT", str(os.getpid())))
if __name__ == "__main__" and not sys.argv[1:]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(seen, [1])[0])
    done = subprocess.run([sys.executable, "-u", "x.py", "child"], input="in", text=True, capture_output=True)
    print(done.returncode, done.stdout, done.stderr)
    left, right = os.pipe()
    again = [sys.executable, "-c", "import os, sys; os.write(int(sys.argv[1]), b'here')", str(right)]
    print(subprocess.run(again, pass_fds=[right], check=True, start_new_session=True), os.read(left, 9))
    print(subprocess.run(["sh", "-c", "exit 7"]).returncode)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.terminate()
    print(child.wait())
elif sys.argv[1:]:
    print(seen(input()))
    sys.exit(5)
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


def test_children_are_fresh_ones_too(tmp_path: Path) -> None:
    """Spawned or started: parent, streams, descriptors, exit status and death by signal; torch is there before."""
    (tmp_path / "x.py").write_text(CHILDREN)
    command = [sys.executable, "x.py"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    fresh = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    other = warm.run(command, tmp_path, environ)
    assert (other.returncode, other.stderr) == (fresh.returncode, fresh.stderr) == (0, "")
    assert re.sub(r"'\d+'", "N", other.stdout) == re.sub(r"'\d+'", "N", fresh.stdout)


def test_gradwatch_is_imported_as_in_a_fresh_process(tmp_path: Path) -> None:
    """One import brings the same modules, in the same order and complete, though their bodies have run before."""
    script = """
import sys
import torch, pydantic.main, pydantic.type_adapter, pydantic.json_schema, ruamel.yaml
from gradwatch.session import watch_function
ours = [name for name in sys.modules if name.startswith("gradwatch")]
import gradwatch
print(ours, all(sys.modules[name].__spec__.name == name for name in ours), hasattr(gradwatch, "sinks"))
print(watch_function.__spec__.loader.get_source("gradwatch.session.watch_function")[:60])
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    fresh = subprocess.run([sys.executable, "-"], input=script, env=environ, capture_output=True, text=True)
    other = warm.run([sys.executable, "-"], tmp_path, environ, script)
    assert (other.stdout, other.stderr) == (fresh.stdout, fresh.stderr)
    assert "gradwatch.session.watch_function" in fresh.stdout


def test_a_script_that_hangs_is_killed(tmp_path: Path) -> None:
    """The time given is the longest that a test waits."""
    with pytest.raises(TimeoutError):
        warm.run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, os.environ, timeout=0.3)
