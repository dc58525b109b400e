"""An account that cannot lie: loops that escape hooks, under `gradwatch run`; what is not counted is said."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.account.loops import LOOPS, Loop
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

SEEN = re.compile(r"^gradwatch: (?P<watched>[\d,]+) of (?P<taken>[\d,]+) steps watched", re.M)


def parameter(loop: Loop) -> Any:
    """The loop by its name, marked `soak` where it is not for every commit."""
    return pytest.param(loop, id=loop.name, marks=[pytest.mark.soak] if loop.soak else [])


def finished(loop: Loop, folder: Path) -> tuple[int, str]:
    """(steps really taken, stderr) of the loop under `gradwatch run`."""
    words = {"file": ["x.py"], "-c": ["-c", loop.script], "stdin": ["-"]}[loop.how]
    (folder / "x.py").write_text(loop.script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWATCH", "PYTHON"))}
    done = warm.run(
        [*GRADWATCH, "run", "--listen", "127.0.0.1:0", "--", sys.executable, *words],
        folder,
        {**kept, "OMP_NUM_THREADS": "1"},
        loop.script if loop.how == "stdin" else "",
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("real ")[-1]), done.stderr


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("loop", [parameter(loop) for loop in LOOPS])
def test_steps_counted_are_steps_taken_or_it_is_said(loop: Loop, tmp_path: Path) -> None:
    """Either every real step was watched, or a line says that something was not seen; never neither."""
    real, stderr = finished(loop, tmp_path)
    found = SEEN.search(stderr)
    whole = found is not None and real == number(found["watched"]) == number(found["taken"])
    said = "gradwatch: not seen: " in stderr or "gradwatch: no training seen" in stderr
    assert whole or said, stderr
    if loop.seen:
        told = re.findall(r"^gradwatch: not seen: (\d+) steps judged for NaN and Inf alone", stderr, re.M)
        assert whole, stderr
        assert told == ([str(loop.provisional)] if loop.provisional else []), stderr
        assert stderr.count("not seen: ") == len(told), stderr


def test_there_are_twenty_loops() -> None:
    """The number that was promised, each of its own name."""
    assert len({loop.name for loop in LOOPS}) == len(LOOPS) >= 20
