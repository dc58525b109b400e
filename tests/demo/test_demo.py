"""The demo: an unmodified script, three faults, every one of them found; a missed one is exit 1."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from gradwatch.cli import demo_screen, main
from gradwatch.demo import faults
from gradwatch.demo.follow_run import SCRIPT, Seen
from gradwatch.journal import read_journal
from gradwatch.records.event import Event
from tests.cli.pseudo_terminal import PseudoTerminal
from tests.docs.test_examples import printed_of
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

PLAN = faults.make_plan(60)
VANISH, NAN, LR = PLAN.faults


def firing(rule: str, detector: str, step: int, *sites: str) -> Event:
    """A firing event of one rule."""
    return Event(
        "firing", rule, detector, "warning", 0, step, f"{rule}-{step}", sites=sites, count=len(sites)
    )


GOOD_EVENTS = (
    firing("vanishing", "below", VANISH.step + 19, "blocks.1.mlp.0.weight"),
    firing("non-finite", "nonfinite", NAN.step, "head.bias", "tokens.weight"),
    firing("norm-spike", "spike", LR.step + 1, "tokens.weight"),
)


@pytest.mark.parametrize("seconds", [1, 20, 60, 600])
def test_faults_follow_one_another(seconds: float) -> None:
    """However long the demo, each fault has its own stretch of steps, long enough for its rule."""
    plan = faults.make_plan(seconds)
    edges = [edge for fault in plan.faults for edge in (fault.step, fault.until)]
    assert edges == sorted(edges)
    assert edges[0] >= 60
    assert edges[-1] == plan.steps
    assert plan.faults[0].until - plan.faults[0].step >= 40


def test_every_fault_found_is_a_pass() -> None:
    """The first event that names each fault is its finding."""
    findings = faults.judge(PLAN, GOOD_EVENTS, {NAN.step})
    assert [finding.event for finding in findings] == list(GOOD_EVENTS)
    assert all(finding.found for finding in findings)
    assert faults.false_alarms(PLAN, GOOD_EVENTS) == ()


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (replace(GOOD_EVENTS[0], sites=("blocks.2.mlp.0.weight",)), VANISH),
        (replace(GOOD_EVENTS[0], step=VANISH.step - 1), VANISH),
        (replace(GOOD_EVENTS[0], step=VANISH.until), VANISH),
        (replace(GOOD_EVENTS[0], detector="spike"), VANISH),
        (replace(GOOD_EVENTS[0], kind="pending"), VANISH),
        (replace(GOOD_EVENTS[1], step=NAN.until), NAN),
        (replace(GOOD_EVENTS[2], detector="below"), LR),
    ],
)
def test_an_event_elsewhere_finds_nothing(event: Event, fault: faults.Fault) -> None:
    """The wrong place, time, kind of rule or transition is no finding."""
    finding = next(each for each in faults.judge(PLAN, [event], {fault.step}) if each.fault is fault)
    assert not finding.found


def test_a_nan_batch_that_was_not_skipped_is_a_miss() -> None:
    """Detected but applied to the weights does not count as handled."""
    finding = faults.judge(PLAN, GOOD_EVENTS, set())[1]
    assert finding.event is not None
    assert not finding.found


def test_a_firing_in_health_is_a_false_alarm() -> None:
    """Before the first fault, and between two."""
    early, between = firing("drift", "drift", 30), firing("drift", "drift", VANISH.until + 5)
    assert faults.false_alarms(PLAN, [early, *GOOD_EVENTS, between]) == (early, between)


def test_the_screen_without_a_terminal_is_plain_lines() -> None:
    """No escape codes, one line per tenth, faults and firings as they come, once each."""
    stream = io.StringIO()
    screen = demo_screen.Screen(PLAN, stream)
    seen = Seen(step=PLAN.steps // 2, loss=1.5, faults={"vanish": VANISH.step}, events=[GOOD_EVENTS[0]])
    seen.firing.add("vanishing")
    for _ in range(3):
        screen.update(seen)
    screen.finish()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "injected" in lines[0]
    assert "vanishing at blocks.1.mlp.0.weight" in lines[1]
    assert "firing: vanishing" in lines[2]
    assert "\x1b" not in stream.getvalue()


def test_the_screen_on_a_terminal_redraws_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is redrawn in place and never longer than the terminal is wide, also in wide characters."""
    drawn = drawn_on_a_terminal(monkeypatch, 70, firing={"a-rule-with-a-long-name-层归" * 3})
    assert len(drawn) > 5
    assert all(cell_len(line.rstrip("\n")) <= 70 for line in drawn)
    assert "".join(drawn).count("\n") == 1


def test_the_bar_grows_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the state, where the terminal has room for both; it is never shorter than before, and full at the end."""
    cells = [line.count("━") for line in drawn_on_a_terminal(monkeypatch, 200)]
    assert sorted(cells) == cells
    assert (cells[0], cells[-1]) == (0, demo_screen.BAR)


def test_events_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event takes the place of the line, which is drawn again below it."""
    drawn = drawn_on_a_terminal(monkeypatch, 200, events=[GOOD_EVENTS[0]])
    assert [line.count("\n") for line in drawn if "vanishing at blocks.1.mlp.0.weight" in line] == [1]
    assert "step" in drawn[-1]


def test_a_terminal_without_a_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """TERM=dumb cannot draw over a line."""
    monkeypatch.setenv("TERM", "dumb")
    told = "".join(drawn_on_a_terminal(monkeypatch, 70))
    assert "\x1b" not in told
    assert told.count("\n") == 10


def drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, **state: Any) -> list[str]:
    """The lines drawn one over the other on a terminal without colour, in the course of a run."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = PseudoTerminal()
    with demo_screen.Screen(PLAN, terminal.stream, terminal.stream) as screen:
        for step in (0, *range(PLAN.steps // 20, PLAN.steps, 10), PLAN.steps - 1):
            screen.update(Seen(step=step, loss=1.5, **state))
    shown = terminal.read().replace("\x1b[?25l", "").replace("\x1b[?25h", "")
    return shown.split("\r\x1b[2K")


def test_the_verdict_names_what_was_missed() -> None:
    """A row per fault, MISSED where nothing found it."""
    told = demo_screen.verdict(faults.judge(PLAN, GOOD_EVENTS[:2], {NAN.step}))
    assert told.count("found") == 2
    assert "MISSED  exploding learning rate" in told
    assert "step skipped" in told


def test_the_script_knows_nothing_of_gradwatch() -> None:
    """It imports torch and the standard library only."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in imported}
    assert roots - set(sys.stdlib_module_names) == {"torch"}


def test_the_demo_finds_every_fault_and_keeps_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short real run: three of three, the non-finite step counted on /metrics, Ctrl-C ends it with 0.

    Its verdict and what commands print of its run are those of examples.md.
    """
    options = [
        "--seconds",
        "1",
        "--hold",
        "--plain",
        "--listen",
        "127.0.0.1:0",
        "--dir",
        str(tmp_path / "runs"),
    ]
    demo = warm.Worker([*GRADWATCH, "demo", *options], os.environ)
    said = []
    for line in demo.stdout:  # ends with the process, or at the line that says that it holds
        said.append(line)
        if line.startswith("holding"):
            break
    told = "".join(said)
    held = re.search(r"holding (http\S+) up", told)
    assert held is not None, told
    with urllib.request.urlopen(held[1], timeout=120) as response:
        metrics = response.read().decode()
    os.kill(demo.pid, signal.SIGINT)
    rest = demo.stdout.read()
    assert demo.communicate() == 0, told + rest
    assert "3 of 3 faults found" in told
    assert f"curl -s {held[1]}" in told
    assert re.search(r'^gradwatch_rule_firings_total\{.*rule="non-finite".*\} 1', metrics, re.MULTILINE)
    assert re.search(r"^gradwatch_skipped_steps_total.* 1", metrics, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    shown = dict(printed_of("`gradwatch demo`"))
    assert worded(shown["demo --seconds 1"].partition("\njournal")[0]) in worded(told)
    for words in ("report", "explain non-finite-0-142"):
        assert main([*words.split(), "--dir", "runs"]) == 0
        out = worded(capsys.readouterr().out.replace(f"{tmp_path}/", "").replace("runs/", "gradwatch-runs/"))
        assert out.startswith(worded(shown[words].partition("; the training finished")[0].rstrip("…\n"))), (
            words
        )
    (journal,) = read_journal(next((tmp_path / "runs").glob("demo-*/")))
    line = next(k for k, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "/ real.sum()" in text)
    assert [one.where.rsplit(".py", 1)[1] for one in journal.findings() if one.op == "div"] == [f":{line}"]


def worded(text: str) -> str:
    """The text without the run and numbers: the demo trains on the standard library of this Python."""
    return re.sub(r" +", " ", re.sub(r"demo-(\d{8}-\d{6}|RUN)|\d[\d.,e+-]*", "_", text))


@pytest.mark.soak
def test_a_missed_fault_is_exit_1(tmp_path: Path) -> None:
    """With rules that see only non-finite gradients two faults are missed, and the verdict says which."""
    rules = tmp_path / "few.gradwatch.yaml"
    rules.write_text("version: 1\nrules:\n  nan: {detect: {kind: nonfinite}, do: [skip_step]}\n")
    options = [
        "--seconds",
        "1",
        "--json",
        "--rules",
        str(rules),
        "--listen",
        "127.0.0.1:0",
        "--dir",
        str(tmp_path),
    ]
    done = subprocess.run([*GRADWATCH, "demo", *options], capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert {row["fault"]: row["found"] for row in document["faults"]} == {
        "vanish": False,
        "nan": True,
        "lr": False,
    }


@pytest.mark.soak
def test_the_script_is_deterministic() -> None:
    """Two runs print the same losses to the last digit."""
    command = [sys.executable, str(SCRIPT), "--steps", "20", "--width", "64"]
    first, second = (subprocess.run(command, capture_output=True, timeout=250, check=True) for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.count(b"loss=") == 20


@pytest.mark.soak
def test_the_full_demo_finds_every_fault_without_a_false_alarm(tmp_path: Path) -> None:
    """The one-minute demo as README shows it."""
    options = ["--json", "--listen", "127.0.0.1:0", "--dir", str(tmp_path)]
    done = subprocess.run([*GRADWATCH, "demo", *options], capture_output=True, text=True, timeout=280)
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["passed"] is True
    assert document["false_alarms"] == []
