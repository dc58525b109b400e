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
UNEVEN_LINES = """version: 1
extends:
- default
# before the second
- diverging
rules:
     # about a
     a:
          detect:   {kind: spike,
                     above: 8}
          annotations:
              summary: >
                 folded
                   further in
              note: one
                and more
          # the last of a
"""
EVEN_LINES = """version: 1
extends:
  - default
  # before the second
  - diverging
rules:
  # about a
  a:
    detect: {kind: spike,
             above: 8}
    annotations:
      summary: >
        folded
          further in
      note: one
        and more
    # the last of a
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


KEPT = {
    "line ends": "version:  1\r\nextends: [default]\r\n",
    "no line end at the end": "version:  1\nextends: [default]",
    "a byte order mark": "\ufeffversion:  1\n",
    "lines of a flow map": """version:  1
rules:
  a: {detect: {kind: spike,
               above: 8}, # what it is
      severity: warning}
  b: {
    detect: {kind: spike, above: 9},
  }
""",
    "lines of text, and how it is spelled": """version:  1
rules:
  a:
    detect: {kind: spike}
    annotations:
      summary: this is
        one text
      help: "\\u00e9 \\x41 é a\\
        b"
      note: |2
           three in
""",
    "comments behind a marker": "--- # one\nversion:  1\n... # two\n",
    "a comment in brackets": "version:  1\nextends: [ # those\n  default,\n]\n",
}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_only_spaces_change(tmp_path: Path, text: str) -> None:
    """Whatever else a file has is there afterwards, byte by byte."""
    path = tmp_path / "my.yaml"
    path.write_bytes(text.encode())
    assert main(["rules", "fmt", str(path)]) == 0
    assert path.read_bytes().decode() == text.replace(":  ", ": ")


def test_lines_that_go_on_move_with_what_they_are_aligned_to(tmp_path: Path) -> None:
    """Those of maps, lists and texts; comments are in the column of what they are about."""
    path = tmp_path / "my.yaml"
    path.write_text(UNEVEN_LINES)
    assert main(["rules", "fmt", str(path)]) == 0
    assert path.read_text() == EVEN_LINES
    assert formatted(EVEN_LINES) == EVEN_LINES


def test_one_that_cannot_be_formatted_leaves_the_others_to_be(tmp_path: Path, capsys: Captured) -> None:
    """A pipe or a link is refused in a sentence, and so is a pack; the file named last is formatted."""
    right, link = tmp_path / "right.yaml", tmp_path / "link.yaml"
    right.write_text(EVEN.replace("version: 1", "version:  1"))
    link.symlink_to(right)
    os.mkfifo(tmp_path / "pipe")
    assert main(["rules", "fmt", "default", str(tmp_path / "pipe"), str(link), str(right)]) == 2
    said = capsys.readouterr().err
    assert "default is a pack that ships with gradwatch, not a file to format" in said
    assert "not a regular file" in said
    assert f"cannot write {link}: it is a link" in said
    assert right.read_text() == EVEN
    assert link.is_symlink()


@pytest.mark.parametrize("pack", pack_names())
def test_shipped_packs_are_formatted(pack: str) -> None:
    """As every file is that `rules fmt` has been run on."""
    path = pack_path(pack)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    assert formatted(text) == text
