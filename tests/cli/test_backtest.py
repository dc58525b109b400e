"""`gradwatch backtest`: what is printed of a run and of several, as JSON, and what is said where that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradwatch.cli import main
from tests.report.runs import broken, recorded, steps

LOUD = "version: 1\nrules:\n  total: {detect: {kind: above, of: total_norm, threshold: 0.1}%s}\n"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a broken run and a healthy one, and two rule files."""
    folder = tmp_path_factory.mktemp("runs")
    for name, records in (("broken", broken()), ("healthy", steps(40))):
        recorded(folder, records, run_id=name).rename(folder / f"{name}-run")
    (folder / "loud.yaml").write_text(LOUD % "", encoding="utf-8")
    (folder / "acts.yaml").write_text(LOUD % ", do: [{clip: {to: 1.0}}, stop]", encoding="utf-8")
    return folder


def printed(words: list[str | Path], status: int, capsys: Captured) -> str:
    """What a command line prints, which ends with this status."""
    assert main(["backtest", *map(str, words)]) == status
    return capsys.readouterr().out


def test_the_newest_run_beside_what_fired_in_it(runs: Path, capsys: Captured) -> None:
    """Rates of alarms, rules with their first step, what fires on one side only."""
    out = printed(["--dir", runs, "--rules", runs / "loud.yaml"], 0, capsys)
    assert "healthy-run: 40 steps judged by loud.yaml" in out
    assert "loud.yaml 1 (25.00 per 1,000 steps), the run 0 (0.00 per 1,000 steps)" in out
    assert "only by loud.yaml:\n    step 0: total (warning)" in out


def test_several_runs_of_which_one_is_named(runs: Path, capsys: Captured) -> None:
    """A row of each; lines say of which run they are."""
    names = [runs / "broken-run", runs / "healthy-run"]
    out = printed([*names, "--rules", runs / "loud.yaml", "--healthy"], 0, capsys)
    assert out.startswith(
        "2 runs: 100 steps judged by loud.yaml\n  false alarms: loud.yaml 2 (20.00 per 1,000 steps)"
    )
    assert "only by the run:\n    broken: step 40: non-finite (critical)" in out
    assert "healthy: step 0: total" in out


def test_firings_that_are_no_alarms_are_named(runs: Path, tmp_path: Path, capsys: Captured) -> None:
    """Of both sides in one line where they are the same; with how often, as `audit` counts them."""
    rules = tmp_path / "parts.yaml"
    part = "  part: {detect: {kind: above, of: total_norm, threshold: 0.1}, inhibited_by: [total]}\n"
    rules.write_text(f"{LOUD % ''}{part}", encoding="utf-8")
    words = [runs / "healthy-run", "--rules", rules]
    said = "no alarm, as part of an incident that another firing reports: part ×1"
    assert f"{said} (parts.yaml)\n" in printed(words, 0, capsys)
    assert f"{said} (parts.yaml and parts.yaml)\n" in printed([*words, "--against", rules], 0, capsys)
    assert "no alarm," not in printed([runs / "healthy-run", "--rules", runs / "loud.yaml"], 0, capsys)
    found = json.loads(printed([*words, "--json"], 0, capsys))["runs"][0]["new"]
    assert found["fired_within_incidents"] == {"part": 1}


def test_what_would_have_been_done(runs: Path, capsys: Captured) -> None:
    """With the stop, and the sentence on all that comes after."""
    out = printed([runs / "healthy-run", "--rules", runs / "acts.yaml"], 0, capsys)
    assert "the training would have been stopped at step 0" in out
    assert "cannot be known" in out
    same = printed(
        [runs / "healthy-run", "--rules", runs / "acts.yaml", "--against", runs / "acts.yaml"], 0, capsys
    )
    assert "the same events as by acts.yaml, byte for byte" in same


def test_what_was_not_judged_in_several_runs(runs: Path, capsys: Captured) -> None:
    """With the number of the runs; a rule that had data in one of them is not listed as without."""
    (runs / "two.yaml").write_text(
        "version: 1\nrules:\n"
        "  ratio: {detect: {kind: above, of: update_ratio, threshold: 1}, every: 4}\n"
        "  spike: {detect: {kind: spike}, warmup: 50}\n"
        "  reward: {detect: {kind: above, of: observed.reward, threshold: 1}}\n",
        encoding="utf-8",
    )
    out = printed([runs / "broken-run", runs / "healthy-run", "--rules", runs / "two.yaml"], 1, capsys)
    assert "(in 1 of 2 runs)" in out
    assert "reward: the run had no value of `reward`\n" in out
    assert "warm-up" not in out


def test_warm_ups_of_several_runs_are_one_line(runs: Path, capsys: Captured) -> None:
    """Each run has another number of samples; where the rules of neither side fire, none is said to."""
    (runs / "slow.yaml").write_text(
        "version: 1\nrules:\n  slow: {detect: {kind: spike}, warmup: 500}\n", encoding="utf-8"
    )
    out = printed([runs / "broken-run", runs / "healthy-run", "--rules", runs / "slow.yaml"], 0, capsys)
    assert "    slow: warm-up not over: 40 to 60 of 500 samples\n" in out
    late = "version: 1\nrules:\n  late: {detect: {kind: above, of: total_norm, threshold: 0.1}, for: 900}\n"
    (runs / "late.yaml").write_text(late, encoding="utf-8")
    quiet = [runs / "healthy-run", "--rules", runs / "late.yaml", "--against", runs / "slow.yaml"]
    out = printed(quiet, 0, capsys)
    assert "  no rule fires\n  nor does any by slow.yaml; details of the events differ" in out


def test_modules_that_were_not_tapped(runs: Path, capsys: Captured) -> None:
    """Rules on them are named, also those that may be about none, and the status says that they were not judged."""
    out = printed([runs / "healthy-run", "--rules", "activations"], 1, capsys)
    assert "dead-activations, saturated-activations, running-statistics-broken, " in out
    assert ": the run tapped no module: " in out


def test_json_has_everything(runs: Path, capsys: Captured) -> None:
    """Every event of both sides, actions, coverage; one object."""
    names = [runs / "broken-run", runs / "healthy-run"]
    found = json.loads(printed([*names, "--rules", "default", "--json"], 1, capsys))
    assert found["steps"] == 100
    assert [one["run"] for one in found["runs"]] == ["broken", "healthy"]
    assert {"alarms", "events", "actions", "coverage", "skipped_steps", "stop"} <= found["runs"][0][
        "new"
    ].keys()
    assert found["runs"][0]["old"]["events"][0]["rule"] == "non-finite"
    (ratio,) = [one for one in found["runs"][1]["new"]["coverage"] if one["rule"] == "update-too-big"]
    assert ratio["extent"] == "not recorded"


def test_the_rank_that_is_judged_of_several(tmp_path: Path, capsys: Captured) -> None:
    """It is named, with the number of those that have a journal; in the table of several runs, too."""
    folder = recorded(tmp_path / "made", steps(40), world_size=2, run_id="two").rename(tmp_path / "two")
    for journal in recorded(tmp_path / "other", steps(40), world_size=2, rank=1).glob("*.gwj"):
        journal.rename(folder / journal.name)
    alone = recorded(tmp_path / "alone", steps(40), run_id="alone")
    (tmp_path / "loud.yaml").write_text(LOUD % "", encoding="utf-8")
    words = ["--rules", tmp_path / "loud.yaml"]
    heading = "two, rank 1 of 2 that have a journal (another: --rank N): 40 steps judged by loud.yaml\n"
    assert heading in printed([folder, "--rank", 1, *words], 0, capsys)
    assert "  two, rank 0 of 2  40 " in printed([folder, alone, *words], 0, capsys)
    found = json.loads(printed([folder, "--json", *words], 0, capsys))
    assert (found["runs"][0]["rank"], found["runs"][0]["ranks"]) == (0, [0, 1])


def test_a_run_that_is_named_twice_is_refused(runs: Path, capsys: Captured) -> None:
    """Also by its journal, or by a link: its steps and alarms would count twice."""
    run = runs / "healthy-run"
    link = runs / "link"
    link.symlink_to(run)
    for other in (run, link, run / "rank0-attempt0.gwj"):
        words = [str(run), str(runs / "broken-run"), str(other), "--rules", str(runs / "loud.yaml")]
        assert main(["backtest", *words]) == 2
        assert f"{run} and {other} are the same run" in capsys.readouterr().err
    link.unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no journal at nowhere"),
        (["RUN", "--rank", "3"], "no journal of rank 3 in RUN; there are: 0"),
        (["RUN", "--backend", "lokki"], "joblib has no backend 'lokki'; there are: "),
    ],
)
def test_the_way_out_of_an_error(runs: Path, capsys: Captured, words: list[str], said: str) -> None:
    """Exit status 2, and a sentence on what there is."""
    run = str(runs / "healthy-run")
    given = [run if word == "RUN" else word for word in words]
    assert main(["backtest", *given, "--rules", str(runs / "loud.yaml")]) == 2
    assert said in capsys.readouterr().err.replace(run, "RUN")


def test_without_joblib_it_says_what_to_install(
    runs: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run at a time needs none."""
    monkeypatch.setitem(sys.modules, "joblib", None)
    monkeypatch.setattr("gradwatch.runtime.optional_dependencies.find_spec", lambda name: None)
    words = [str(runs / "healthy-run"), "--rules", str(runs / "loud.yaml")]
    assert main(["backtest", *words]) == 0
    assert main(["backtest", *words, "--jobs", "2"]) == 2
    assert "pip install 'gradwatch[parallel]'" in capsys.readouterr().err
