"""`gradwatch tune`: the file that it writes is what backtest.md shows, loads, and does what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwatch.checkpoint.health_tag import HealthTag, write_tag
from gradwatch.cli import main
from gradwatch.records.record import CheckpointHealth
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
    assert threshold["extreme_score"] > 6
    assert found["after"]["spike"] <= found["allowed"] < found["before"]["spike"]


def test_a_run_that_did_not_end_well_is_doubted(runs: list[str], capsys: Captured) -> None:
    """Thresholds made of its explosion would let the next one pass."""
    write_tag(Path("b"), HealthTag(0, 3, CheckpointHealth(False, 3, ("a norm grew",)), attempt=None))
    try:
        assert main(["tune", *runs, "--healthy", "--budget", "2", "--rules", "rules/mine.yaml"]) == 0
    finally:
        Path("b", "checkpoint-health-rank0.json").unlink()
    assert "  warning: the weights of b are not healthy: did nothing go wrong?\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "with --healthy"),
        (["--healthy", "--budget", "0"], "no number of steps can tell"),
        (["--healthy"], "say --budget 0.999"),
        (["--healthy", "--budget", "2", "-o", "nowhere/x.yaml"], "cannot write nowhere/x.yaml"),
        (["--healthy", "--budget", "inf"], "--budget inf: "),
        (
            ["--healthy", "--budget", "2", "-o", "rules"],
            "rules: it is a folder; name another file: -o FILE\n",
        ),
    ],
)
def test_the_way_out_of_an_error(runs: list[str], capsys: Captured, words: list[str], said: str) -> None:
    """Exit status 2, and no file."""
    assert main(["tune", *runs, "--rules", "rules/mine.yaml", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("tuned.gradwatch.yaml").exists()


def test_a_run_that_is_named_twice_is_refused(runs: list[str], capsys: Captured) -> None:
    """One run is no evidence for another, and its steps do not count twice."""
    again = "b/rank0-attempt0.gwj"
    assert main(["tune", *runs, again, "--healthy", "--budget", "2", "--rules", "rules/mine.yaml"]) == 2
    assert f"b and {again} are the same run" in capsys.readouterr().err


def test_no_run_at_a_time_is_refused(runs: list[str], capsys: Captured) -> None:
    """Exit status 2, and a sentence in place of joblib's traceback."""
    assert main(["tune", *runs, "--healthy", "--jobs", "0"]) == 2
    assert "'0' is no number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["rules/mine.yaml", "rules/link.yaml", "rules/base.yaml"])
def test_the_rules_to_begin_with_are_not_overwritten(
    made: Path, runs: list[str], output: str, capsys: Captured
) -> None:
    """Nor what they extend: a file that extends itself can be read no more."""
    folder = made / "rules"
    (folder / "base.yaml").write_text(RULES, encoding="utf-8")
    (folder / "mine.yaml").write_text("version: 1\nextends: [base.yaml]\n", encoding="utf-8")
    (folder / "link.yaml").unlink(missing_ok=True)
    (folder / "link.yaml").symlink_to("mine.yaml")
    before = Path(output).read_text(encoding="utf-8")
    words = ["tune", *runs, "--healthy", "--budget", "2", "--rules", "rules/mine.yaml", "-o", output]
    try:
        assert main(words) == 2
        assert f"cannot write {output}: --rules rules/mine.yaml is read from it" in capsys.readouterr().err
        assert Path(output).read_text(encoding="utf-8") == before
    finally:
        (folder / "mine.yaml").write_text(RULES, encoding="utf-8")
