"""`gradwatch tune`: the file that it writes is what backtest.md shows, loads, and does what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwatch.cli import main
from tests.backtest.noisy_runs import folders
from tests.docs.test_pages import ROOT

Captured = pytest.CaptureFixture[str]
RULES = "version: 1\nrules:\n  spike: {detect: {kind: spike, above: 6}, warmup: 50}\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two healthy runs, and of a rule file in one below it."""
    folder = tmp_path_factory.mktemp("runs")
    folders(folder)
    (folder / "rules").mkdir()
    (folder / "rules" / "mine.yaml").write_text(RULES, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def runs(made: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs, by their names in the working folder."""
    monkeypatch.chdir(made)
    (made / "tuned.gradwatch.yaml").unlink(missing_ok=True)
    return ["a", "b"]


def test_what_is_written_and_printed_is_what_the_page_shows(runs: list[str], capsys: Captured) -> None:
    """Word for word; and a backtest by the file finds what its comments say."""
    text = (ROOT / "gradwatch/docs/backtest.md").read_text(encoding="utf-8")
    assert main(["tune", *runs, "--healthy", "--budget", "2", "--rules", "rules/mine.yaml"]) == 0
    assert f"\n```\n{capsys.readouterr().out}```\n" in text
    assert f"\n```text\n{Path('tuned.gradwatch.yaml').read_text(encoding='utf-8')}```\n" in text
    assert main(["backtest", *runs, "--healthy", "--rules", "tuned.gradwatch.yaml"]) == 0
    assert "false alarms: tuned.gradwatch.yaml 1 (0.33 per 1,000 steps)" in capsys.readouterr().out


def test_json(runs: list[str], capsys: Captured) -> None:
    """The counts, and each threshold with the score it is to hold back."""
    words = [
        "tune",
        *runs,
        "--healthy",
        "--budget",
        "2",
        "--rules",
        "rules/mine.yaml",
        "--json",
        "-o",
        "new.yaml",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["runs"], found["output"]) == (3000, 2, "new.yaml")
    (threshold,) = found["thresholds"]
    assert threshold["was"] == 6
    assert threshold["now"] > 6
    assert found["after"]["spike"] <= found["allowed"] < found["before"]["spike"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "with --healthy"),
        (["--healthy", "--budget", "0"], "no number of steps can tell"),
        (["--healthy"], "say --budget 0.999"),
        (["--healthy", "--budget", "2", "-o", "nowhere/x.yaml"], "cannot write nowhere/x.yaml"),
    ],
)
def test_the_way_out_of_an_error(runs: list[str], capsys: Captured, words: list[str], said: str) -> None:
    """Exit status 2, and no file."""
    assert main(["tune", *runs, "--rules", "rules/mine.yaml", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("tuned.gradwatch.yaml").exists()
