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


def test_nothing_is_said_of_rules_that_a_pack_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the file takes over as it is, is no surprise of this file; of a pack itself all its rules are told."""
    assert (
        noted("version: 1\nextends: [default]\nrules: {exploded: {severity: warning}}\n", tmp_path, capsys)
        == ""
    )
    note = noted("version: 1\nextends: [default]\nrules: {dead: {severity: warning}}\n", tmp_path, capsys)
    assert "in turns (`every: 1`: all at each step): dead" in note
    assert "stuck" not in note
    assert main(["rules", "check", "default"]) == 0
    assert "update-too-big, dead, stuck" in capsys.readouterr().out


def test_columns_of_modules_without_taps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a rule never has data, which is told before a training says so."""
    rule = "version: 1\nrules: {r: {detect: {kind: above, of: grad_output_norm, threshold: 5}}}\n"
    assert "no data for r: such columns are of tapped modules" in noted(rule, tmp_path, capsys)
    taps = 'modules: {tap: output, names: ["*"]}\n'
    assert "no data for" not in noted(rule + taps, tmp_path, capsys)
