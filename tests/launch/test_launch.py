"""`gradwatch run --quiet X` is `python X`: small scripts compared byte for byte, bare and watched (P38).

Without `--quiet` one or two lines of gradwatch's follow on stderr when the process ends: `tests/account`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.launch_cases import CASES, GRADWATCH, Case


def environment(case: Case, cwd: Path) -> dict[str, str]:
    """The same environment for both runs, without what the test run itself was started with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWATCH", "PYTHON"))}
    extra = {name: value.format(cwd=cwd) for name, value in case.environ.items()}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **extra}


def outcome(command: Sequence[str], case: Case, cwd: Path) -> tuple[int, bytes, bytes]:
    """(exit status, stdout, stderr) of one run."""
    done = subprocess.run(
        list(command),
        cwd=cwd,
        env=environment(case, cwd),
        input=case.stdin.encode(),
        capture_output=True,
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


def bare_outcome(command: Sequence[str], case: Case, cwd: Path) -> tuple[int, bytes, bytes]:
    """The same without `gradwatch run`; of a script that trains, from a Python that has imported torch."""
    if case.name != "train-exception":
        return outcome(command, case, cwd)
    done = warm.run(command, cwd, environment(case, cwd), case.stdin)
    return done.returncode, done.stdout.encode(), done.stderr.encode()


def parameter(case: Case) -> Any:
    """The case by its name, marked `soak` where it is not for every commit."""
    return pytest.param(case, id=case.name, marks=[pytest.mark.soak] if case.soak else [])


@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
def test_a_watched_script_is_byte_identical_to_a_bare_one(case: Case, tmp_path: Path) -> None:
    """Exit status, stdout and stderr are the same under `gradwatch run` as without it."""
    cwd = tmp_path / "work"
    cwd.mkdir()
    for name, text in case.files.items():
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text(text)
    command = [word.replace("{python}", sys.executable) for word in case.command]
    launcher = [
        *GRADWATCH,
        "run",
        "--quiet",
        "--dir",
        str(tmp_path / "runs"),
        "--listen",
        "127.0.0.1:0",
        "--",
    ]
    bare = bare_outcome(command, case, cwd)
    watched = outcome([*launcher, *command], case, cwd)
    assert watched == bare
    # A process killed at once may die before the journal's writer thread has made the file.
    if case.name.startswith("train") and case.name != "train-sigterm":
        assert list((tmp_path / "runs").glob("*/rank0-*.gwj")), "the training was not watched at all"


def test_there_are_forty_cases() -> None:
    """The number that P38 promises."""
    assert len({case.name for case in CASES}) >= 40
