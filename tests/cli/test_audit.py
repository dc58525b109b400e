"""`gradwatch audit` of one rank says which others did something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gradwatch.cli import main
from tests.report.runs import finished, recorded, steps

Captured = pytest.CaptureFixture[str]


def two_ranks(root: Path, skipped: Mapping[int, int], ended: bool = True) -> Path:
    """The folder of a run on whose ranks the same rule fired; steps were skipped on each so many times."""
    folders = [
        recorded(
            root / str(rank),
            steps(40),
            rank=rank,
            world_size=2,
            closed=ended,
            account=finished(40, fired={"non-finite": 1}, actions={"skip_step": times}, rank=rank),
        )
        for rank, times in skipped.items()
    ]
    for journal in folders[1].glob("*.gwj"):
        journal.rename(folders[0] / journal.name)
    return folders[0]


def test_a_rank_on_which_more_was_done(tmp_path: Path, capsys: Captured) -> None:
    """The same rules fired, and thirty steps were skipped in the place of one."""
    run = str(two_ranks(tmp_path, {0: 1, 1: 30}))
    assert main(["audit", run]) == 0
    assert "  rank 1: fired: non-finite ×1; done: skip_step ×30 (gradwatch audit " in capsys.readouterr().out
    assert main(["audit", "--json", "--rank", "1", run]) == 0
    assert json.loads(capsys.readouterr().out)["other_ranks"]["0"]["actions"] == {"skip_step": 1}


def test_the_run_may_be_named_as_for_explain(tmp_path: Path, capsys: Captured) -> None:
    """`--run RUN`, which the last line of a run shows, is the same as RUN; two runs are refused."""
    run = str(two_ranks(tmp_path, {0: 1, 1: 1}))
    for command in ("audit", "report"):
        form = ["--json"]
        assert main([command, *form, run]) == 0
        named = capsys.readouterr().out
        assert main([command, *form, "--run", run]) == 0
        assert capsys.readouterr().out == named
    assert main(["audit", run, "--run", "another"]) == 2
    assert "one run at a time" in capsys.readouterr().err


def test_a_rank_that_did_the_same(tmp_path: Path, capsys: Captured) -> None:
    """Nothing is said of it."""
    assert main(["audit", "--json", str(two_ranks(tmp_path, {0: 3, 1: 3}))]) == 0
    assert json.loads(capsys.readouterr().out)["other_ranks"] == {}
