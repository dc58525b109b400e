"""The end of all processes of a script."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwatch.cli.processes.started_processes import end_all

IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEPS = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="sessions of their own are found by /proc")
def test_processes_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    """A child that ignores SIGTERM and has left the session, as a launcher's worker; others are left alone."""
    (tmp_path / "child.py").write_text(IGNORES + SLEEPS)
    child_file = str(tmp_path / "child.py")
    (tmp_path / "parent.py").write_text(
        f"import subprocess, sys\nwords = [sys.executable, {child_file!r}, sys.argv[1]]\n"
        "subprocess.Popen(words, start_new_session=True).wait()"
    )
    child = [sys.executable, child_file]
    started = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "ours")]
    theirs = subprocess.Popen([*child, str(tmp_path / "theirs")])
    try:
        ours = subprocess.Popen(
            started, env={**os.environ, "MARKED": str(tmp_path / "mark")}, start_new_session=True
        )
        while not ((tmp_path / "ours").exists() and (tmp_path / "theirs").exists()):
            time.sleep(0.05)
        end_all(ours, str(tmp_path / "mark"))
        assert ours.returncode is not None
        assert not _runs("child.py", str(tmp_path / "ours"))
        assert theirs.poll() is None
    finally:
        theirs.kill()
        theirs.wait()


def _runs(*words: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return any(
        all(word in line for word in words) for line in listed.splitlines() if not line.startswith("Z")
    )
