"""`gradwatch doctor`: what works here is said to work, what does not is named with its remedy."""

from __future__ import annotations

import json
import math
import socket
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.cli import main
from gradwatch.cli.doctor import torch_probes
from gradwatch.cli.doctor.last_run import account_of_endpoint, newest_account
from gradwatch.rules.files import parse_rules
from gradwatch.session import session_account
from gradwatch.session.pipeline import deferred_steps
from gradwatch.taps.process_totals import TOTALS

RUNNING = """version: 1
rules:
  nan: {detect: {kind: nonfinite}, do: [skip_step]}
  off: {detect: {kind: above, of: norm, threshold: 1}, exclude: ["*"]}
"""
CALM = """version: 1
rules: {large: {detect: {kind: above, of: norm, threshold: 1e9}}}
"""

FACTORY = """
import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), lambda model: model(torch.ones(4, 8)).square().mean()
broken = 3
"""


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and the checks by name."""
    status = main(["doctor", "--json", *words])
    return status, {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_all_is_well_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tap of this torch works, the default pack is valid, and the cost is a number."""
    words = ("--dir", str(tmp_path), "--listen", "127.0.0.1:0", "--seconds", "0.3")
    status, checks = examined(capsys, *words)
    assert status == 0
    assert all(checks[name]["status"] == "ok" for name in torch_probes.PROBES)
    assert checks["default"]["status"] == "ok"
    assert "% a step" in checks["own model"]["detail"]


def test_a_model_of_the_users_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--model MODULE:FACTORY is looked for in the cwd first; rules that cannot speak about it are named."""
    (tmp_path / "doctor_subject.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    _, checks = examined(capsys, "--model", "doctor_subject:build", "--seconds", "0.1")
    assert "72 parameters" in checks["doctor_subject:build"]["detail"]
    assert any(check["section"] == "rules on the model" for check in checks.values())
    assert not (tmp_path / "gradwatch-runs").exists()


@pytest.mark.parametrize("reference", ["no_such_module:build", "json:no_such", "json"])
def test_a_model_that_is_not_there_is_exit_2(reference: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message repeats what was asked for."""
    assert main(["doctor", "--model", reference, "--seconds", "0.1"]) == 2
    assert reference in capsys.readouterr().err


def test_a_port_in_use_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """A taken port never stops training, so it is no failure; where the endpoint goes instead is said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        status, checks = examined(capsys, "--listen", listen, "--seconds", "0")
    assert status == 0
    assert checks["port"]["status"] == "note"
    assert "endpoint-rank0.json" in checks["port"]["detail"]


def test_what_would_fail_is_exit_1_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad rule file, a folder nobody can write, GRADWATCH=0: each fails and says what to do."""
    rules = tmp_path / "bad.yaml"
    rules.write_text("version: 1\nrules: {x: {detect: {kind: nonfinit}}}\n")
    monkeypatch.setenv("GRADWATCH", "0")
    status, checks = examined(capsys, "--rules", str(rules), "--dir", "/proc/none", "--seconds", "0.1")
    assert status == 1
    failed = {name for name, check in checks.items() if check["status"] == "fail"}
    assert failed == {"switch", "run directory", str(rules)}
    assert checks[str(rules)]["advice"] == f"gradwatch rules check {rules}"
    assert "own model" not in checks


def test_a_broken_tap_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that raises is a failure with the reason, never a traceback."""

    def broken() -> str:
        raise AttributeError("no such hook")

    monkeypatch.setitem(torch_probes.PROBES, "tensor hook", broken)
    assert torch_probes.probe_all()["tensor hook"] == (False, "AttributeError: no such hook")


def test_the_probes_leave_nothing_behind() -> None:
    """No hook of a probe stays on torch's global lists."""
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    torch_probes.probe_all()
    after = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    assert after == before


def test_the_report_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sections, a mark per check, and what to do next."""
    assert main(["doctor", "--seconds", "0", "--dir", str(tmp_path), "--listen", "127.0.0.1:0"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "versions"
    assert "✓ torch" in told
    assert "next: gradwatch run" in told


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what other tests have trained is counted."""
    monkeypatch.setattr(session_account, "_concluded", [])
    TOTALS.reset()


def asked(directory: Path) -> tuple[str, list[str], bool] | None:
    """The account of the newest run, once its journal is begun: a thread does that, and another one answers."""
    deadline = time.monotonic() + 120
    while True:
        found = newest_account(directory)
        if (found is not None and "no summary" not in found[1][0]) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def test_steps_that_wait_to_be_judged_are_seen(
    tmp_path: Path, fresh_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run nothing is claimed before its first step; then no step is missed, and one that is not watched is."""
    monkeypatch.setattr(deferred_steps, "LONGEST", math.inf)  # no clock decides when they are judged
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, unwatched = (torch.optim.SGD(each.parameters(), 1e-6) for each in (model, other))

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    there = {"run_dir": tmp_path, "listen": "127.0.0.1:0", "rules": parse_rules(CALM)}
    with gradwatch.watch(model, optimizer, **there) as gw:
        model(torch.ones(2, 4)).sum().backward()
        early = asked(tmp_path)
        optimizer.step()
        steps(99)  # until ordinary ones are told from others
        assert gw.flush()
        steps(5)
        found = asked(tmp_path)
        other(torch.ones(2, 4)).pow(2).mean().backward()
        unwatched.step()
        missed = asked(tmp_path)
    assert early is not None
    assert early[1:] == (["running: no optimizer step yet, 1 backward"], False)
    assert found is not None
    assert found[2], found[1]
    assert found[1][0].startswith("running: 105 of 105 steps watched (5 of them not judged yet) · ")
    assert missed is not None
    assert not missed[2]
    assert "1 of 106 optimizer steps not watched" in missed[1][1]


def test_all_watches_of_a_running_process_are_told(tmp_path: Path, fresh_process: None) -> None:
    """Each has an endpoint: steps and firings add up, and what the process did counts once."""
    rules, watches, models = parse_rules(RUNNING), [], [nn.Linear(4, 1), nn.Linear(4, 1)]
    for model, steps in zip(models, (3, 5), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        there = {"run_dir": tmp_path, "run_id": "r", "listen": "127.0.0.1:0"}
        watches.append(gradwatch.watch(model, optimizer, rules=rules, **there))
        for step in range(steps):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).pow(2).mean() * (float("nan") if step == 1 else 1.0)).backward()
            optimizer.step()
        assert watches[-1].flush()
    # Left by a killed process: whoever has its port is not asked.
    left = json.loads((tmp_path / "r" / "endpoint-rank0.json").read_text(encoding="utf-8"))
    (tmp_path / "r" / "endpoint-rank0-7.json").write_text(json.dumps({**left, "place": 7, "started": 1}))
    alone, found = account_of_endpoint(tmp_path / "r", 1), account_of_endpoint(tmp_path / "r", 0)
    for gw in watches:
        gw.close()
    assert alone is None
    assert found is not None
    assert (found.watched.steps, found.fired, found.processes) == (8, {"nan": 2}, 1)
    assert found.taken.steps == TOTALS.taken().steps


def test_a_running_run_is_told_as_its_status_tells_it(tmp_path: Path, fresh_process: None) -> None:
    """Steps, coverage, firings, actions and rules that are off: status, metrics and doctor say the same meanwhile."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = parse_rules(RUNNING)
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, listen="127.0.0.1:0") as gw:
        for step in range(6):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).pow(2).mean() * (float("nan") if step == 3 else 1.0)).backward()
            optimizer.step()
        assert gw.flush()
        status = gw.status()
        found = newest_account(tmp_path)
        assert gw.url is not None
        with urllib.request.urlopen(gw.url) as page:
            metrics = page.read().decode()
    assert (status["steps"], status["coverage"]) == (6, 1.0)
    assert status["inactive"] == {"off": "matches no parameter"}
    assert 'gradwatch_rule_inactive{rule="off",reason="matches no parameter"} 1' in metrics
    assert found is not None
    line = found[1][0]
    assert line.startswith("running: 6 of 6 steps watched · ")
    for said in ("coverage 100%", "fired: nan ×1", "done: skip_step ×1", "no data for 1 of 2 rules"):
        assert said in line
    assert "(matches no parameter)" in line
