"""`gradwatch report`: which run, in which form, to which place, and what is said where that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradwatch.cli import main
from tests.report.runs import broken, finished, recorded, steps
from tests.support.sink_records import make_event, make_record, make_sites


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs, the newer one broken."""
    folder = tmp_path_factory.mktemp("runs")
    recorded(folder, steps(8), account=finished(8)).rename(folder / "older")
    for path in (folder / "older").iterdir():
        os.utime(path, (1, 1))
    recorded(folder, broken(), account=finished(60, fired={"non-finite": 1})).rename(folder / "newer")
    return folder


def test_the_newest_run_and_the_verdict(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name it is the last run; stdout has the sentence and where the page is; no colours in a pipe."""
    assert main(["report", "--dir", str(runs)]) == 0
    sentence, place = capsys.readouterr().out.splitlines()
    assert sentence.startswith("Went wrong: rule non-finite (critical) fired at step 40")
    assert place.startswith(str(runs / "newer" / "report.html"))


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        (["--format", "md"], "# run-1"),
        (["--json"], '{"format": 1'),
        (["-o", "-"], "<!doctype html>"),
        (["-o", "x.md"], "# run-1"),
        (["-o", "x.json"], '{"format": 1'),
        (["-o", "x.json", "--format", "md"], "# run-1"),
    ],
)
def test_forms_and_places(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    begins: str,
) -> None:
    """The option says the form, else the file's name; a file that is named is written, else stdout."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs / "newer"), *options]) == 0
    files = list(tmp_path.iterdir())
    text = files[0].read_text(encoding="utf-8") if files else capsys.readouterr().out
    assert text.startswith(begins)
    assert bool(files) == any(word.startswith("x.") for word in options)


def test_two_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Side by side, in a file that is not that of one run; the document has both in their order."""
    both = [str(runs / name) for name in ("newer", "older")]
    assert main(["report", *both]) == 0
    assert "comparison.html" in capsys.readouterr().out
    assert main(["report", *both, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [one["steps"] for one in found] == [60, 8]


def test_no_name_reaches_the_terminal_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a rule's id, nor a run's, nor that of its folder can send an escape sequence."""
    for folder in ("one", "two"):
        event = make_event(rule="\x1b[31mr\n", severity="critical")
        records = [make_record(make_sites(2), events=(event,))]
        recorded(tmp_path / folder, records, run_id="\x1b[32mrun").rename(tmp_path / f"{folder}\x1b[33m")
    runs = [str(tmp_path / f"{folder}\x1b[33m") for folder in ("one", "two")]
    for words in (runs, runs[:1], [*runs, "--format", "md"]):
        assert main(["report", *words]) == 0
        said = capsys.readouterr().out
        assert "\\x1b[31mr\\x0a" in said
        assert all(line.isprintable() for line in said.splitlines())
    assert main(["audit", runs[0]]) == 0
    assert "\\x1b[31mr\\x0a" in capsys.readouterr().out


def test_what_cannot_be(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run, no such rank, no such folder to write to, no file: one line on stderr, exit 2, no traceback."""
    os.mkfifo(tmp_path / "pipe")
    for words, said in (
        (["--dir", str(tmp_path)], "no runs in"),
        ([str(tmp_path / "gone")], "no journal at"),
        ([str(runs / "newer"), "--rank", "7"], "no journal of rank 7"),
        ([str(runs / "newer"), "-o", str(tmp_path / "gone" / "x.html")], "cannot write"),
        (
            [str(runs / "newer"), "-o", str(tmp_path / "pipe")],
            "it is a pipe (FIFO); name another file: -o FILE",
        ),
    ):
        assert main(["report", *words]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
