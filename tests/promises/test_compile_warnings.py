"""torch.compile beside the default watch: it compiles what it compiles bare, and warns of nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.promises import launched

NAME = "compile_warnings"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Warnings of Python's and log records of torch's, of the script alone."""
    found = said(launched.bare(NAME, tmp_path_factory.mktemp("bare")))
    assert [one for one in found if "Profiler" in one]  # of the step that is compiled whole
    return found


def said(outcome: launched.Outcome) -> set[str]:
    """The warnings of a run that ended well, and what torch has logged as warnings or errors."""
    assert outcome.status == 0, outcome.stderr
    logged = re.findall(r"^[WEC]\d{4} .*?\] (?:\[[\d/_]+\] )?(.+)$", outcome.stderr, re.MULTILINE)
    return {*json.loads(outcome.stdout), *logged}


def test_watch_makes_torch_compile_warn_of_nothing(bare: set[str], tmp_path: Path) -> None:
    """With the default rules; a model whose class is the script's own compiles with `fullgraph=True` as bare."""
    assert said(launched.watching_itself(NAME, tmp_path, "--watch")) == bare


def test_run_makes_torch_compile_warn_of_nothing(bare: set[str], tmp_path: Path) -> None:
    """The same script under `gradwatch run`."""
    outcome = launched.watched(NAME, tmp_path)
    assert said(outcome) == bare
    assert len(outcome.records()) == 18
