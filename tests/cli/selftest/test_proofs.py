"""What is said of each fault, by what the processes of the script have told."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from gradwatch.cli.selftest.proofs import ONE_RANK, REJECTED, not_reached, proofs
from gradwatch.cli.selftest.script_run import ScriptRun, read_document
from gradwatch.launch.selftest_faults import RESULTS, Document, Result
from gradwatch.rules.files import load_rules

BROKE = "gradwatch itself failed (ValueError: x), not the script: please report it"


def _run(document: Document | None, status: int | None = 0) -> ScriptRun:
    return ScriptRun(document, Path("none"), status)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (Result("nan", 5, "w", lasted=1, entered=1, ended=True), ""),
        (Result("nan", 5, "w", lasted=1, entered=1, rejected=1, ended=True), REJECTED),
        (Result("nan", 5, "w", lasted=1, entered=1, rejected=1, fired={"a": 1}, late=0, ended=True), ""),
        (
            Result("nan", 5, "w", lasted=1, fired={"a": 1}, late=0, ended=True),
            "no gradient of w came by its tensor hook",
        ),
        (Result("nan", 5, "w"), "the script ended while it lasted; let it take more steps"),
    ],
)
def test_a_fault_is_judged_only_where_it_has_entered(result: Result, why: str) -> None:
    """What fired of itself has not found it; one that the scaler kept out is not missed."""
    found = proofs([_run(Document(steps=9, results=[result]))], load_rules("default"), 60)
    assert found[0].why == why
    assert found[0].rules == (tuple(result.fired) if not why else ())
    assert found[-1].why == ONE_RANK


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (_run(None), "no step was taken"),
        (_run(None, None), "no step was taken in 300 s"),
        (_run(Document(why="of its own")), "of its own"),
        (_run(Document(broke="ValueError: x"), 1), BROKE),
        (_run(Document()), "no optimizer took a step, and a loop without one cannot be tested"),
        (_run(Document(rejected=3)), "the GradScaler rejected all of 3 steps"),
        (_run(Document(steps=9, most_steps=9)), "the script ended after 9 steps; let it take more"),
        (_run(Document(steps=9, most_steps=9), 1), "the script ended with exit status 1 after 9 steps"),
        (
            _run(Document(steps=9, most_steps=4)),
            "the script ended after 9 steps, at most 4 of one optimizer; let it take more",
        ),
        (
            _run(Document(steps=9, most_steps=9, time_up=True)),
            "the 60 s there were ended after 9 steps: give more, --seconds 240",
        ),
        (
            _run(Document(steps=9, most_steps=9), None),
            "the 60 s there were ended after about 9 steps: give more, --seconds 240",
        ),
    ],
)
def test_why_a_fault_was_not_reached(run: ScriptRun, why: str) -> None:
    """The clock, the script, gradwatch itself, or that there is no optimizer."""
    assert not_reached(run, 60) == why


def test_a_failure_of_any_rank_is_told(tmp_path: Path) -> None:
    """The rest is of the first rank; a file that is not whole yet is none."""
    assert read_document(tmp_path) is None
    (tmp_path / RESULTS.format(1)).write_text(json.dumps(asdict(Document(steps=4, broke="ValueError: x"))))
    (tmp_path / RESULTS.format(0)).write_text("{")
    assert read_document(tmp_path) == Document(broke="ValueError: x")
    (tmp_path / RESULTS.format(0)).write_text(json.dumps(asdict(Document(steps=5))))
    assert read_document(tmp_path) == Document(steps=5, broke="ValueError: x")
