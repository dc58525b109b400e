"""The gate itself: it names tests that there are, runs them, goes on where it was, and is red where one of them is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.benchmarks.versions import ROOT
from tests.gate import __main__ as gate
from tests.gate.promises import PROMISES, Promise

TESTS = """
import pytest
def test_one(record_property):
    "Passes."
    record_property("seen", "7 of 7")
@pytest.mark.soak
def test_full():
    "Passes, behind a marker."
def test_other():
    "Passes once the file is there."
    import pathlib
    assert pathlib.Path(__file__).with_name("mended").exists()
def test_skipped():
    "Has a reason."
    pytest.skip("no such machine")
"""
NAMES = ("one", "full", "other", "skipped")


def test_every_promise_is_held_by_tests_that_there_are() -> None:
    """Each file and each test exists; a promise without one says what is missing."""
    assert len({one.key for one in PROMISES}) == len(PROMISES)
    for promise in PROMISES:
        assert bool(promise.tests) != bool(promise.missing), promise.key
        for test in promise.tests:
            file, _, name = test.partition("::")
            path = ROOT / file
            assert path.exists(), test
            if name:
                found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                assert name in {one.name for one in found if isinstance(one, ast.FunctionDef)}, test


def test_what_has_passed_is_not_run_again_and_what_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A gate that was broken off goes on; it is green when each promise is, and the table has what was seen."""
    (tmp_path / "test_it.py").write_text(TESTS)
    one, full, other, skipped = (f"{tmp_path}/test_it.py::test_{name}" for name in NAMES)
    promises = (
        Promise("A", "one", "7", (one, full)),
        Promise("B", "other", "1", (other, skipped)),
        Promise("C", "none", "1", (), missing="not built"),
    )
    monkeypatch.setattr(gate, "PROMISES", promises)
    monkeypatch.setattr(gate, "commit_of", lambda folder: "abc")
    monkeypatch.setattr(gate, "WORKERS", ())
    results = str(tmp_path / "gate.json")
    assert gate.main(["--results", results]) == 1
    said = capfd.readouterr()
    assert "| A | one | 7 | 7 of 7 | green (2 passed, " in said.out
    assert "| B | other | 1 |  | **red** (0 passed, 1 failed, 1 skipped, " in said.out
    assert "| C | none | 1 | not built | **not held** |" in said.out
    (tmp_path / "mended").touch()
    assert gate.main(["--results", results]) == 0
    said = capfd.readouterr()
    assert "A: one (7)" not in said.err
    assert "B: other (1)" in said.err
    assert said.out.count("green (") == 2
    assert gate.main(["--results", results, "--list"]) == 0
    assert "    not built" in capfd.readouterr().out


def test_a_promise_that_nobody_made_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With its name, before anything runs."""
    with pytest.raises(SystemExit):
        gate.main(["P99"])
    assert "no such promise: P99" in capsys.readouterr().err
