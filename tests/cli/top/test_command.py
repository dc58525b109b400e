"""`gradwatch top` on real terminals, in pipes, as JSON; and `gradwatch run --live`."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gradwatch.checkpoint.health_tag import HealthTag, write_tag
from gradwatch.cli import main
from gradwatch.records.record import CheckpointHealth, Record
from tests.cli.terminal_session import TerminalSession
from tests.report.live.test_journal_source import Writing
from tests.report.runs import HOSTILE, SITES, broken, finished, recorded, steps
from tests.support.launch_cases import GRADWATCH, TRAIN
from tests.support.sink_records import make_event, make_record, make_sites

ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"
ENV = {**os.environ, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
for name in ("NO_COLOR", "COLUMNS", "TMUX", "TMUX_PANE"):
    ENV.pop(name, None)


def test_a_pipe_gets_it_once_without_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest run, no escape codes, no line wider than a page, and what to type next; the exit status is 0."""
    recorded(tmp_path, broken(), account=finished(60, fired={"non-finite": 1}))
    assert main(["top", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    assert "still firing when the process ended: non-finite" in out
    assert out.splitlines()[-1] == f"next: gradwatch explain --run {tmp_path / 'run-1'}"


@pytest.mark.parametrize(
    ("norms", "tag", "said"),
    [
        ([1.0, 1.0], None, "no rule has fired in 2 steps; of the weights nothing is known"),
        ([1.0, 1.0], CheckpointHealth(True, 1, weights_step=1), "healthy: no rule has fired in 2 steps"),
        (
            [1.0, 1.0],
            CheckpointHealth(True, 1),
            "no rule has fired in 2 steps; of the weights nothing is known",
        ),
        (
            [1.0, 1.0],
            CheckpointHealth(False, 0, ("a norm grew",)),
            "the weights are not healthy: a norm grew",
        ),
        (
            [1.0, math.nan],
            CheckpointHealth(True, 1),
            "gradients are not finite at step 1, and no rule says so",
        ),
    ],
)
def test_healthy_is_what_the_weights_are_and_not_that_no_rule_has_fired(
    norms: list[float],
    tag: CheckpointHealth | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rule file that only clips has no rule that could fire."""
    folder = recorded(
        tmp_path, [make_record(SITES, norm, step=at) for at, norm in enumerate(norms)], account=finished(2)
    )
    if tag is not None:
        write_tag(folder, HealthTag(0, 1, tag))
    assert main(["top", str(folder)]) == 0
    assert said in capsys.readouterr().out


def test_a_run_of_which_too_little_was_seen_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the report says it, of one that has ended; of one that goes on nothing is said but what was seen so far."""
    learning = dict.fromkeys(("a", "b"), "warm-up not over: 3 of 20 samples")
    tag = HealthTag(0, 2, CheckpointHealth(True, 2, weights_step=2))
    ended = recorded(tmp_path / "ended", steps(3), account=finished(3, rules=5, no_data=learning))
    running = Writing(tmp_path / "running")
    running.write(*(make_record(SITES, step=step, wall_time=time.time()) for step in range(3)))
    for folder, said in (
        (ended, "nothing found: no rule has fired in 3 steps; 2 of 5 rules had seen too few steps to judge"),
        (running.folder, "so far no rule has fired in 3 steps"),
    ):
        write_tag(folder, tag)
        assert main(["top", "--once", str(folder)]) == 0
        assert said in capsys.readouterr().out


def test_json_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document, in which a norm that is NaN is a string."""
    recorded(tmp_path, broken(), account=finished(60))
    assert main(["top", str(tmp_path / "run-1"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["process"], found["worst"], found["skipped"]) == ("finished", "non-finite", 1)
    assert found["optimizers"][0]["total_norms"][40] == "NaN"


def test_two_optimizers_have_the_losses_that_are_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a GAN have one each; one that both step by is drawn once, also where it is NaN."""
    for name, losses, heads in (
        ("gan", (1.0, 2.0), ["loss 0", "loss 1"]),
        ("shared", (math.nan, math.nan), ["loss 0"]),
    ):
        records = [
            make_record(SITES, step=step, optimizer=number, scalars={"loss": loss, "lr": 0.1})
            for step in range(3)
            for number, loss in enumerate(losses)
        ]
        folder = recorded(tmp_path / name, records)
        assert main(["top", str(folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[1] for line in lines if line.startswith("  loss")] == heads
        assert [line.split("  ")[1] for line in lines if line.startswith("  lr")] == ["lr 0", "lr 1"]


def test_what_cannot_be_shown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run, no such rank, no such address, a wrong interval: exit 2 and a way out."""
    recorded(tmp_path / "runs", steps(3))
    for words, said in (
        (["--dir", str(tmp_path / "none")], "gradwatch run -- python train.py"),
        ([str(tmp_path / "runs" / "run-1"), "--rank", "3"], "no journal of rank 3"),
        (["127.0.0.1:1"], "cannot read http://127.0.0.1:1/metrics"),
        (["https://[::1"], "'https://[::1' is no address"),
        (["http://[x]:1"], "'http://[x]:1' is no address"),
        (["http://localhost:abc"], "cannot read http://localhost:abc/metrics: nonnumeric port"),
        (["--interval", "0"], "from 0.1 to 3600"),
    ):
        assert main(["top", *words]) == 2
        assert said in capsys.readouterr().err


def test_no_name_reaches_the_terminal_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a parameter, nor a rule, nor a run can send an escape sequence or begin a line."""
    name = f"\x1b[31m\n{HOSTILE}"
    event = make_event(rule=name, severity="critical", sites=(name,), count=1, summary=name)
    records = [
        make_record(make_sites(names=[name, "b"]), step=step, events=(event,) * (step == 1))
        for step in range(3)
    ]
    recorded(tmp_path, records, run_id="\x1b[32mrun", script=name).rename(tmp_path / "run")
    assert main(["top", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert not any(line.startswith("</script") for line in out.splitlines())
    assert "firing now" in out


def test_a_terminal_without_blocks_gets_letters(tmp_path: Path) -> None:
    """Where the encoding has no block characters, bars are ASCII."""
    recorded(tmp_path, steps(30))
    env = {**ENV, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*GRADWATCH, "top", "--dir", str(tmp_path)], capture_output=True, env=env, check=True
    )
    assert "total norm" in done.stdout.decode("ascii")
    assert b"\\u2581" not in done.stdout


def test_q_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """The second screen is left, the last picture stays, typing is shown again; the run goes on."""
    writing = Writing(tmp_path, pid=os.getpid(), host=platform.node())
    writing.write(*now(5))
    with TerminalSession(
        [*GRADWATCH, "top", "--dir", str(tmp_path), "--interval", "0.1"], tmp_path, ENV
    ) as session:
        session.wait_for("no rule has fired in 5 steps")
        event = make_event(step=5, sites=SITES.names[:1], count=1)
        writing.write(make_record(SITES, step=5, events=(event,), wall_time=time.time()))
        session.wait_for("firing: non-finite")
        assert not session.echoes()
        session.press("q")
        assert session.process.wait(60) == 0
        assert session.echoes()
        shown = session.wait_for(NORMAL)
        assert shown.count(ALTERNATE) == 1
        assert "firing: non-finite" in session.wait_for("done: ").rpartition(NORMAL)[2]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_leave_the_terminal_as_it_was(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """Ctrl-C is a way to leave; SIGTERM and SIGHUP end it, with the screen and the echo given back."""
    writing = Writing(tmp_path, pid=os.getpid(), host=platform.node())
    writing.write(*now(5))
    with TerminalSession([*GRADWATCH, "top", "--dir", str(tmp_path)], tmp_path, ENV) as session:
        session.wait_for("no rule has fired")
        os.kill(session.process.pid, number)
        assert session.process.wait(60) == status
        session.wait_for(NORMAL)
        assert session.echoes()
        assert "Traceback" not in session.text


def test_the_end_of_the_run_ends_it(tmp_path: Path) -> None:
    """With the last picture, and the command that says more."""
    recorded(tmp_path, broken(), account=finished(60, fired={"non-finite": 1}))
    with TerminalSession([*GRADWATCH, "top", "--dir", str(tmp_path)], tmp_path, ENV) as session:
        assert session.process.wait(60) == 0
        assert "next: gradwatch explain --run" in session.wait_for("next: ").rpartition(NORMAL)[2]


def test_no_color_is_respected(tmp_path: Path) -> None:
    """On a terminal, too, the picture has no colours then."""
    recorded(tmp_path, broken(), account=finished(60))
    for env, coloured in ((ENV, True), ({**ENV, "NO_COLOR": "1"}, False)):
        with TerminalSession([*GRADWATCH, "top", "--dir", str(tmp_path)], tmp_path, env) as session:
            assert session.process.wait(60) == 0
            assert ("\x1b[31m" in session.wait_for("next: ") or "\x1b[1" in session.text) == coloured


def now(count: int) -> list[Record]:
    """Steps of the last seconds: none for long would be a stall."""
    return [replace(record, wall_time=time.time()) for record in steps(count)]


def live(tmp_path: Path, script: str, **streams: object) -> TerminalSession:
    (tmp_path / "train.py").write_text(script)
    command = [*GRADWATCH, "run", "--live", "--listen", "127.0.0.1:0", "--", sys.executable, "train.py"]
    return TerminalSession(command, tmp_path, ENV, **streams)


def test_live_is_shown_where_the_script_writes_elsewhere(tmp_path: Path) -> None:
    """Both streams redirected: the view is drawn on the terminal until the script has ended; the output is its own."""
    with (tmp_path / "log").open("wb") as log:
        session = live(tmp_path, TRAIN, stdout=log, stderr=log)
    with session:
        assert session.process.wait(120) == 0
        last = session.wait_for("next: gradwatch").rpartition(NORMAL)[2]
        assert "train.py · finished" in last
    written = (tmp_path / "log").read_text()
    assert written.startswith("loss ")
    assert "gradwatch: 3 of 3 steps watched" in written
    assert "gradwatch top" not in written


def test_live_says_what_to_type_where_it_cannot_be_shown(tmp_path: Path) -> None:
    """A script that writes to the terminal keeps it; one line more says what to type."""
    with live(tmp_path, "print('theirs')") as session:  # whatever it does: a training takes seconds to start
        assert session.process.wait(120) == 0
        text = session.wait_for("theirs\n")
        assert f"type in another terminal: gradwatch top --dir {tmp_path / 'gradwatch-runs'}" in text
        assert ALTERNATE not in text
