"""`gradwatch rules fmt`: the layout changes, nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.rules.files import parse_rules
from gradwatch.rules.packs import pack_names, pack_path
from gradwatch.rules.yaml.formatting import formatted

UNEVEN = """# what this is for
version:   1
rules:
     a:                          # the first
          detect: {kind: spike,   above: "8"}
          do:
          - skip_step
     b: {detect: {kind: above, of: lr, threshold: 1e-7}}
"""
EVEN = """# what this is for
version: 1
rules:
  a:                             # the first
    detect: {kind: spike, above: 8.0}
    do:
      - skip_step
  b: {detect: {kind: above, of: lr, threshold: 1e-7}}
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.gradwatch.yaml"
    path.write_text(UNEVEN.replace('"8"', "8.0"))
    path.chmod(0o640)
    return path


def test_it_is_formatted_and_says_the_same(file: Path, capsys: Captured) -> None:
    """Comments, numbers as they were spelled and permissions stay; a second time nothing changes."""
    before = parse_rules(file.read_text(), "x").digest
    assert main(["rules", "fmt", str(file)]) == 0
    assert capsys.readouterr().out == f"formatted  {file}\n"
    assert file.read_text() == EVEN
    assert parse_rules(EVEN, "x").digest == before
    assert file.stat().st_mode & 0o777 == 0o640
    assert main(["rules", "fmt", str(file)]) == 0
    assert capsys.readouterr().out == ""


def test_check_changes_nothing(file: Path, capsys: Captured) -> None:
    """Exit 1, with the file named."""
    before = file.read_bytes()
    assert main(["rules", "fmt", "--check", str(file)]) == 1
    assert "would be formatted" in capsys.readouterr().out
    assert file.read_bytes() == before


def test_what_is_refused_is_left_alone(tmp_path: Path, capsys: Captured) -> None:
    """Exit 2 with the problem; other files are formatted all the same."""
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("version: 1\nrules: {a: {detect: {kind: nan}}}\n")
    right.write_text(EVEN.replace("version: 1", "version:  1"))
    assert main(["rules", "fmt", str(wrong), str(right), str(tmp_path / "none")]) == 2
    assert "wrong.yaml:2:" in capsys.readouterr().err
    assert right.read_text() == EVEN
    assert sorted(os.listdir(tmp_path)) == ["right.yaml", "wrong.yaml"]


@pytest.mark.parametrize("pack", pack_names())
def test_shipped_packs_are_formatted(pack: str) -> None:
    """As every file is that `rules fmt` has been run on."""
    path = pack_path(pack)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    assert formatted(text) == text
