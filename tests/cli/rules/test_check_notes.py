"""Notes of `gradwatch rules check`: what is right, and may surprise."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwatch.cli import main

HEAD = 'version: 1\ngroups:\n  rest: {params: ["*"]}\n  head: {params: ["head.*"]}\n'


def noted(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The notes on a file that is right."""
    path = folder / "noted.gradwatch.yaml"
    path.write_text(text)
    assert main(["rules", "check", str(path)]) == 0
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("note"))


def test_a_clip_group_that_is_never_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the model: it is named with its place, and the group that takes all it has."""
    policies = "clip: {groups: {head: {method: norm, max_norm: 1.0}, rest: {method: agc, ratio: 0.01}}}\n"
    note = noted(HEAD + policies, tmp_path, capsys)
    assert "clip group 'head'" in note
    assert "noted.gradwatch.yaml:4" in note
    assert "'rest' stands before it under `groups:`" in note
    assert noted(HEAD + "clip: {groups: {head: {method: norm, max_norm: 1.0}}}\n", tmp_path, capsys) == ""


def test_for_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a column is read every so many steps, the note says how many steps `for` is."""
    rule = "version: 1\nrules: {{zeros: {{detect: {{kind: above, of: zero_fraction, threshold: 0.5}}, for: 50{}}}}}\n"
    note = noted(rule.format(""), tmp_path, capsys)
    assert (
        "one in 10 steps of each parameter or module: zeros `for: 50` = 500 steps; `every: 1` for as many"
        in note
    )
    assert noted(rule.format(", every: 1"), tmp_path, capsys) == ""
