"""What is imported at the start of a healthy run, and until its end: what has a part in it, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.start import SCRIPT
from tests.support.launch_cases import GRADWATCH

OF_WATCHES = {
    *("dataclasses", "inspect", "socket", "json", "numpy", "platform", "secrets"),
    *("gradwatch.rules.rule_set", "gradwatch.records"),
}
LIBRARIES = {"pydantic", "pydantic_core", "ruamel", "rich", "structlog", "attr", "prometheus_client"}
OF_RULE_FILES = {"gradwatch.rules.files", "gradwatch.rules.yaml", "gradwatch.rule_tests"}
OF_INCIDENTS = {
    "gradwatch.localise.diagnosis.diagnose",
    "gradwatch.localise.replay.step_replay",
    "gradwatch.incidents.bundle.incident_json",
    "gradwatch.session.actions.snapshot_action",
}
OF_TRAININGS = {
    "gradwatch.engine",
    "gradwatch.session.session",
    "gradwatch.rules.rule_set",
    "gradwatch.endpoint",
}
OF_OTHER_COMMANDS = {"gradwatch.monitoring", "gradwatch.inspect", "gradwatch.sinks.trackers", "http.server"}

WATCHED = [
    *(*GRADWATCH, "run", "--listen", "127.0.0.1:0"),
    *("--", sys.executable, "-X", "importtime", "-c"),
]
MOST_MODULES = 400
"""Of ours in a healthy run: each takes 0.4 ms of the start, and 0.1 ms of the end."""


def imports_of(words: list[str], folder: Path) -> set[str]:
    """Every module that a Python imports from its start to its end, by what `-X importtime` says."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRADWATCH")}
    done = subprocess.run(
        words, cwd=folder, env={**environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    return set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))


def test_a_healthy_run_imports_what_it_needs(tmp_path: Path) -> None:
    """No library that checks rule files, draws or logs, and nothing that is for incidents and other commands."""
    found = imports_of([*WATCHED, SCRIPT], tmp_path)
    assert {"torch", "gradwatch.session.session", "gradwatch.journal.process_account"} <= found
    assert found & (LIBRARIES | OF_RULE_FILES | OF_INCIDENTS | OF_OTHER_COMMANDS) == set()
    assert len([name for name in found if name.startswith("gradwatch")]) <= MOST_MODULES


def test_a_process_that_does_not_train_imports_less(tmp_path: Path) -> None:
    """A worker that imports torch waits for a training: it has neither rules nor an endpoint."""
    found = imports_of([*WATCHED, "import torch"], tmp_path)
    assert {"torch", "gradwatch.launch.auto_watch"} <= found
    assert found & (LIBRARIES | OF_RULE_FILES | OF_TRAININGS | OF_OTHER_COMMANDS) == set()


def test_the_launcher_imports_little(tmp_path: Path) -> None:
    """It reads its options and becomes the command: it needs no rule set and no socket."""
    words = [
        sys.executable,
        "-X",
        "importtime",
        *GRADWATCH[1:],
        "run",
        "--listen",
        "127.0.0.1:0",
        "--",
        "true",
    ]
    found = imports_of(words, tmp_path)
    assert "gradwatch.launch.script_environment" in found
    assert found & (LIBRARIES | OF_WATCHES) == set()
