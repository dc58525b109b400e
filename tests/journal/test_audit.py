"""The clip audit: how often, by which rule, how hard, as the journal has it."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

from gradwatch.account import Account
from gradwatch.cli import main
from gradwatch.journal import read_journal
from gradwatch.journal.audit import Audit
from gradwatch.records.decision import CLIP_SECTION, Order
from gradwatch.records.finding import Finding
from gradwatch.records.record import Record
from gradwatch.runtime.internal_errors import Health
from gradwatch.session.pipeline.deferred_steps import MOST
from gradwatch.sinks.journal import JournalSink
from tests.report.runs import finished, recorded, steps
from tests.support import warm
from tests.support.acting_cases import Training, run_folder, watched
from tests.support.kept import Kept
from tests.support.launch_cases import GRADWATCH, ROOT
from tests.support.sink_records import make_event, make_record, make_run, make_sites

TEXT = """
rules:
  spike: {detect: {kind: above, threshold: 5}, do: [clip: {to: 0.5}, escalate: {after: 5 in 10, to: skip_step}]}
  nan: {detect: {kind: nonfinite}, do: [skip_step]}
  quiet: {detect: {kind: above, threshold: 5}, mode: shadow, do: [clip: {to: 0.25}]}
"""


def trained(folder: Path) -> list[Record]:
    """A run with spikes and a NaN in its journal; the Records as a sink saw them."""
    training, kept, options = Training(), Kept(), run_folder(folder)
    options["sinks"] = [kept, *options["sinks"]]
    with watched(training, TEXT, **options) as (gw, _):
        for scale in ({}, {"2__weight": 1000.0}, {"0__weight": 3000.0}, {}, {"2__weight": math.nan}, {}):
            training.step(**scale)
        training.step(**{"2__weight": 1000.0})
        training.step(**{"2__weight": 1000.0})
        assert gw.flush(30)  # a slow disk: closing gives up after 1.5 s
    return kept.records


def audited(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    status = main(["audit", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_a_cause_stands_with_its_own_step() -> None:
    """That of the first firing as it is; where only a later one has any, with the step of that one."""
    audit = Audit()
    audit.take_events([make_event(step=step, incident=f"non-finite-0-{step}") for step in (90, 60, 95)])
    audit.take_findings([Finding("backward", "replay", step=90, op="sqrt", incident="non-finite-0-90")])
    (fired,) = audit.fired()
    assert (fired.times, fired.first_step, fired.incidents[0]) == (3, 60, "non-finite-0-60")
    assert (fired.cause, fired.cause_step) == ("at step 90: the backward of sqrt", 90)
    audit.take_findings([Finding("forward", "replay", step=60, op="log", incident="non-finite-0-60")])
    (fired,) = audit.fired()
    assert (fired.cause, fired.cause_step) == ("the forward of log", 60)


def test_the_journal_gives_back_every_number_of_an_order(tmp_path: Path) -> None:
    """Rule, action, site, count, norms before and after, coefficient: as the sinks were told."""
    records = trained(tmp_path)
    (journal,) = read_journal(tmp_path / "r")
    found = [step.record.decision.orders for step in journal.records()]
    assert found == [record.decision.orders for record in records]


def test_the_audit_counts_what_the_records_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a count over the Records themselves."""
    records = trained(tmp_path)
    status, found = audited(capsys, str(tmp_path / "r"))
    assert status == 0
    assert (found["steps"], found["skipped_steps"], found["clipped_by_others"]) == (8, 2, 0)
    lines = {(line["rule"], line["action"], line["shadow"]): line for line in found["actions"]}
    expected: dict[tuple[str, str, bool], list[Order]] = {}
    for record in records:
        for order in record.decision.orders:
            expected.setdefault((order.rule, order.action, order.shadow), []).append(order)
    assert {key: line["times"] for key, line in lines.items()} == {key: len(v) for key, v in expected.items()}
    clip = lines["spike", "clip", False]
    coefficients = sorted(order.coefficient or 0.0 for order in expected["spike", "clip", False])
    assert clip["coefficient_min"] == coefficients[0]
    assert clip["coefficient_median"] == coefficients[1]
    assert clip["hardest"]["step"] == 2
    assert (clip["first_step"], clip["last_step"]) == (1, 6)
    assert clip["worst_sites"] == {"2.weight": 2, "0.weight": 1}
    assert clip["share_of_steps"] == pytest.approx(3 / 8)
    assert lines["nan", "skip_step", False]["coefficient_min"] is None
    assert found["escalated"] == {"spike": 1}


def test_a_person_reads_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table without colour into a pipe; the newest run of --dir where none is named."""
    trained(tmp_path)
    assert main(["audit", "--dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'r'}: 8 steps recorded" in said
    (line,) = [line for line in said.splitlines() if line.split()[:2] == ["spike", "clip"]]
    assert "3" in line.split()
    assert "37.50%" in line
    assert "at 2" in line
    assert "clip (shadow)" in said
    assert "escalated: rule spike climbed its ladder 1 times" in said
    assert "\x1b" not in said


STANDING = {
    "step": "clip: {total: {method: norm, max_norm: 0.05}}",
    "groups": "groups: {w: {params: ['*.weight']}}\nclip: {groups: {w: {method: norm, max_norm: 0.05}}}",
    "backward": "clip: {total: {method: norm, max_norm: 0.01, scope: param}, at: backward}",
}


@pytest.mark.parametrize("place", list(STANDING))
def test_standing_and_foreign_clips_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """The file's own `clip:` has no rule; what got smaller without any of ours is the script's own clipping."""
    for name, rules in (("ours", f"{STANDING[place]}\nrules: {{}}"), ("theirs", "rules: {}")):
        training, kept, options = Training(), Kept(), {**run_folder(tmp_path), "run_id": name}
        options["sinks"] = [kept, *options["sinks"]]
        with watched(training, rules, **options):
            for _ in range(5):
                training.backward()
                before = training.norms()
                if name == "theirs":
                    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
                training.optimizer.step()
                after = training.norms()
                assert place == "backward" or sum(after.values()) < sum(before.values())
        status, found = audited(capsys, str(tmp_path / name))
        assert status == 0
        if name == "theirs":
            assert (found["clipped_by_others"], found["actions"]) == (5, [])
            continue
        (line,) = found["actions"]
        assert (line["rule"], line["action"], line["times"]) == (CLIP_SECTION, "clip", 5)
        assert found["clipped_by_others"] == 0
        hardest = kept.records[line["hardest"]["step"]].snapshot
        least = float(hardest.coef.min())
        assert line["coefficient_min"] == pytest.approx(least, rel=1e-4)
        k = int(hardest.coef.argmin())
        whole = place == "step"
        after_k = hardest.total_norm_applied if whole else float(hardest.norm[k] * hardest.coef[k])
        assert line["hardest"]["norm_after"] == pytest.approx(after_k)
        assert bool(line["worst_sites"]) != whole


def test_what_failed_is_told_and_is_an_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1, so that a script can tell."""
    sites, sink = make_sites(), JournalSink()
    sink.open(make_run(tmp_path), Health())
    sink.write(make_record(sites, step=3, events=(make_event("failed", "exploding"),)))
    sink.flush(60.0)  # to close waits for no slow disk
    sink.close()
    status, found = audited(capsys, str(tmp_path / "run-1"))
    assert status == 1
    assert found["failed"] == {"exploding": 1}
    assert main(["audit", str(tmp_path / "run-1")]) == 1
    said = capsys.readouterr().out
    assert "failed: the actions of rule exploding could not be carried out 1 times" in said


def test_a_run_without_actions_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No empty table."""
    training = Training()
    with watched(training, "rules: {r: {detect: {kind: nonfinite}}}", **run_folder(tmp_path)):
        training.step()
    assert main(["audit", str(tmp_path / "r")]) == 0
    assert "nothing was done to the gradients, and no step was skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dir", "missing"], "no runs in missing"),
        (["missing"], "missing"),
        (["{run}", "--rank", "3"], "no journal of rank 3 in .*; there are: 0"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    """Exit 2, no traceback."""
    import re

    monkeypatch.chdir(tmp_path)
    training = Training()
    with watched(training, "rules: {r: {detect: {kind: nonfinite}}}", **run_folder(tmp_path)):
        training.step()
    assert main(["audit", *(word.format(run=tmp_path / "r") for word in words)]) == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.err)
    assert len(captured.err.splitlines()) == 1


SCRIPT = """
import atexit, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(print, "left in order")
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 3)).square().mean()
    (loss * (float("nan") if step == 3 else 1.0)).backward()
    HOW
    print("stepped", step)
"""
RULES = "version: 1\nrules: {r: {detect: {kind: nonfinite}, severity: critical, do: [stop]}}\n"


@pytest.mark.parametrize(
    ("how", "status"),
    [("optimizer.step()", 86), ("try: optimizer.step()\n    except Exception: raise SystemExit(7)", 7)],
)
def test_a_stopped_run_exits_with_86_and_its_journal_is_complete(
    tmp_path: Path, how: str, status: int
) -> None:
    """Under `gradwatch run`: the traceback as ever, atexit functions run, and a script that handles it has its way."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("HOW", how))
    (tmp_path / "stop.gradwatch.yaml").write_text(RULES)
    options = ["--dir", "runs", "--run-id", "r", "--listen", "127.0.0.1:0", "--rules", "stop.gradwatch.yaml"]
    done = warm.run([*GRADWATCH, "run", *options, "--", sys.executable, "train.py"], tmp_path)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines() == ["stepped 0", "stepped 1", "stepped 2", "left in order"]
    if status == 86:
        *_, error, account = done.stderr.rstrip().splitlines()
        assert error.endswith("stopped training at step 3: rule r says stop")
        assert account.startswith("gradwatch: 4 of 4 steps watched")
        assert " · stopped · " in account
        assert "Traceback" in done.stderr
    (journal,) = read_journal(tmp_path / "runs" / "r")
    records = [step.record for step in journal.records()]
    assert [record.decision.stop for record in records] == [False, False, False, True]
    assert journal.complete


KILLED = """
import os, time, torch, gradwatch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gw = gradwatch.watch(model, optimizer, rules="default", run_dir="runs", run_id="r", listen="127.0.0.1:0")
(journal,) = [sink.sink for sink in gw._session._sinks if sink.name == "journal"]
journal.on_acknowledged = lambda event: event.rule != "non-finite" or os.kill(os.getpid(), 9)
for step in range(6):
    optimizer.zero_grad()
    model(torch.full((2, 4), float("nan") if step == 5 else 1.0)).sum().backward()
    optimizer.step()
time.sleep(60)
"""


def test_a_killed_run_is_never_said_to_have_been_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An incident is durable before its step is: what the lost steps were to do is told by their incidents."""
    environ = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    victim = warm.run([sys.executable, "-c", KILLED], tmp_path, environ)
    assert victim.returncode == -9
    run = str(tmp_path / "runs" / "r")
    status, found = audited(capsys, run)
    told = {(each["rule"], each["action"]) for each in (*found["actions"], *found["unrecorded"])}
    assert (status, found["unfinished"]) == (0, True)
    assert ("non-finite", "skip_step") in told
    assert main(["audit", run]) == 0
    said = capsys.readouterr().out
    assert "nothing was done" not in said
    assert "the journal has no end" in said
    assert f"the last {MOST - 1} ordinary steps" in said


@pytest.mark.parametrize("account", [None, finished(20_000)], ids=["no account", "account"])
def test_steps_that_are_not_in_the_journal_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], account: Account | None
) -> None:
    """Of a journal that was thinned to stay within its cap, whether or not it has an account."""
    folder = recorded(tmp_path, steps(20_000, make_sites(50)), max_bytes=1_000_000, account=account)
    _, found = audited(capsys, str(folder))
    assert found["missing_steps"] == 20_000 - found["steps"] > 10_000
    said = f"missing: {found['missing_steps']:,} steps, from step "
    for command in (["audit"], ["explain", "--run"]):
        main([*command, str(folder)])
        assert said in capsys.readouterr().out, command


def test_a_finished_run_has_nothing_unrecorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every incident's step is there once the journal was closed in order."""
    trained(tmp_path)
    _, found = audited(capsys, str(tmp_path / "r"))
    assert (found["unfinished"], found["unrecorded"], found["missing_steps"]) == (False, [], 0)
