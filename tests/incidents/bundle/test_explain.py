"""`gradwatch explain` of incidents with bundles: where they are, how to run them again, in all three forms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.journal import read_journal
from gradwatch.journal.incidents import incidents
from gradwatch.rules.files import parse_rules
from gradwatch.sinks.journal import JournalSink
from tests.incidents.bundle.cases import RULES, Run, rules


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training with two incidents; the second one's batch can be run again, and has a journal beside it."""
    folder = tmp_path_factory.mktemp("runs")
    return Run(
        folder,
        rules("batch: true, parameters: true, keep: 1"),
        bad=(4, 9),
        steps=14,
        sinks=[JournalSink()],
        before=lambda gw, step: gw.observe(loss=step / 2),
    )


def told(run: Run, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `explain` prints."""
    assert main(["explain", "--dir", str(run.directory.parent), *words]) == 0
    return capsys.readouterr().out


def test_the_page_says_where_the_bundle_is_and_how_to_run_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cause first; then what fired, the norms before and after, what was done; then the command."""
    page = told(run, capsys, "non-finite-0-4")
    sections = [line for line in page.splitlines() if line.startswith("#")]
    assert [line.split(":")[0].removesuffix("non-finite-0-4").strip("# ") for line in sections][1:] == [
        *("Evidence", "Likely fix", "What happened", "Norms around it", "What was done", "Run it again"),
    ]
    assert f"    gradwatch replay {run.directory}/bundles/non-finite-0-4 --script MODULE:FUNCTION" in page
    steps = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:]
    assert steps == [str(step) for step in range(8)]
    assert "← here, skipped" in page
    assert "- `skip_step`, by rule `non-finite`" in page


def test_the_command_it_prints_works(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word, with a script in place of MODULE:FUNCTION."""
    page = told(run, capsys, "non-finite-0-4")
    command = next(line for line in page.splitlines() if "gradwatch replay" in line).split()[1:]
    assert main([*command[:-1], "tests.incidents.bundle.cases:build"]) == 0
    assert "the same cause as when it happened" in capsys.readouterr().out


def test_an_incident_without_a_bundle_has_no_such_section(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """`keep: 1`: the second has its page, and no command."""
    assert "Run it again" not in told(run, capsys, "non-finite-0-9")


def test_all_of_it_as_json(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """One document each, strict JSON: cause, event, what was done, norms, bundle, command."""

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    found = json.loads(told(run, capsys, "--json"), parse_constant=refuse)["findings"]
    assert [one["incident"] for one in found] == ["non-finite-0-4", "non-finite-0-9"]
    first, second = found
    assert first["op"] == "sqrt"
    assert first["suggestion"]["id"] == "sqrt-at-zero"
    assert first["event"]["severity"] == "critical"
    assert {order["action"] for order in first["done"]} == {"skip_step", "localise", "snapshot"}
    assert [one["step"] for one in first["around"]] == list(range(8))
    assert first["around"][4]["total_norm"] in ("NaN", "Infinity")
    assert first["around"][3]["loss"] == 1.5
    assert first["bundle"] == str(run.directory / "bundles" / "non-finite-0-4")
    assert first["reproduce"] == f"gradwatch replay {first['bundle']} --script MODULE:FUNCTION"
    assert (second["bundle"], second["reproduce"], second["obstacle"]) == (None, None, "")


def test_as_markdown(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of the bundle, with the steps after it; never painted, not even for a terminal."""
    monkeypatch.setattr("gradwatch.cli.terminal.colourful", lambda stream: True)
    page = told(run, capsys, "non-finite-0-4", "--markdown")
    assert "\x1b" not in page
    kept = (
        (run.directory / "bundles" / "non-finite-0-4" / "incident.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    assert [line for line in kept if line not in page.splitlines()] == []
    assert "\x1b" in told(run, capsys, "non-finite-0-4")


def test_a_bundle_that_cannot_be_read_is_told(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is there all the same, with what is wrong."""
    folder = Path(shutil.copytree(run.directory, tmp_path / "copy"))
    (folder / "bundles" / "non-finite-0-4" / "incident.json").write_text("{")
    assert main(["explain", "non-finite-0-4", "--run", str(folder)]) == 0
    page = capsys.readouterr().out
    assert "the backward of sqrt in Fragile" in page
    assert "cannot be run again: it cannot be read" in page
    assert "incident.json:1:2: not JSON" in page


def test_an_incident_nobody_looked_into_has_a_page_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name: what fired, the norms, what was done; no cause. Without a name all that fired is listed."""
    text = RULES.replace("localise, ", "").replace("SNAPSHOT", "batch: true")
    run = Run(tmp_path, parse_rules(text), sinks=[JournalSink()])
    where = ["--run", str(run.directory)]
    assert main(["explain", "non-finite-0-4", *where]) == 1
    page = capsys.readouterr().out
    assert page.startswith("## non-finite-0-4: Non-finite gradients.")
    assert "### Norms around it" in page
    assert "gradwatch replay" in page
    assert main(["explain", *where]) == 1
    listed = capsys.readouterr().out
    assert "what fired" in listed
    assert listed.splitlines()[-1].split() == ["non-finite", "critical", "1", "4", "4", "–"]


def test_the_incident_in_the_journal_is_that_of_the_bundle(run: Run) -> None:
    """Two sources, one noun: the same event, cause, orders and norms; the journal knows what came after too."""
    (journal,) = read_journal(run.directory)
    first = next(incidents(journal))
    kept = run.document.incident
    for field in ("name", "step", "rank", "run_id", "event", "finding", "done", "versions", "world_size"):
        assert str(getattr(first, field)) == str(getattr(kept, field)), field
    assert str(first.around[: len(kept.around)]) == str(kept.around)
    assert [one.step for one in first.around[len(kept.around) :]] == [5, 6, 7]


def test_forms_exclude_each_other(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """--json and --markdown are two answers to one question."""
    assert main(["explain", "--json", "--markdown"]) == 2
    assert "not allowed with" in capsys.readouterr().err
