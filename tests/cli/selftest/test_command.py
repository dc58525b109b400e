"""`gradwatch selftest` on real scripts: what is found, what is missed, and what stays as it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.launch.fault_injection.state_before_fault import SavedState
from tests.sinks.notify.receiver import receiving
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

TRAIN = """import pathlib, sys, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
print(pathlib.Path("config").read_text())
pathlib.Path("config").write_text("overwritten")
for step in range(int(sys.argv[1])):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    (model(x) - x.norm(dim=1, keepdim=True)).square().mean().backward()
    optimizer.step()
torch.save(model.state_dict(), "last.pt")
"""
NONFINITE = "version: 1\nrules:\n  bad: {detect: {kind: nonfinite}, severity: critical, do: [DOES]}\n"
FAULTS = ["nan", "inf", "spike", "vanishing", "freeze"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "config").write_text("mine")
    return tmp_path


def selftest(folder: Path, *options: str, steps: int = 100_000) -> subprocess.CompletedProcess[str]:
    command = [*GRADWATCH, "selftest", *options, "--", sys.executable, "train.py", str(steps)]
    return warm.run(command, folder, timeout=280)


def faults(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {one["fault"]: one for one in json.loads(done.stdout)["faults"]}


def test_the_default_pack_finds_every_fault(folder: Path) -> None:
    """Rule, action, counter and alert of each; nothing of the folder is changed."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = selftest(folder, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = faults(done)
    assert [name for name, one in found.items() if one["rules"]] == FAULTS
    assert found["nan"]["actions"] == ["localise", "skip_step"]
    assert found["rank"]["why"] == "one rank only"
    assert all(one["metric"] for name, one in found.items() if name in FAULTS)
    if shutil.which("promtool"):
        assert all(all(one["alerts"].values()) for one in found.values())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_rules_miss_is_said(folder: Path) -> None:
    """A file that knows only NaN: the exit status is 1, and the table has what was missed."""
    (folder / "rules.yaml").write_text(NONFINITE.replace("DOES", "skip_step"))
    done = selftest(folder, "--rules", "rules.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("MISSED") == 3
    assert "2 of 5 injected faults found; all rules" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_sink_sends_the_faults(folder: Path) -> None:
    """Sinks that write to people, and the targets of Prometheus, get nothing."""
    (folder / "targets").mkdir()
    with receiving() as got:
        sinks = f"sinks: [journal, log, prometheus: {{file_sd: targets}}, webhook: {{url: '{got.url}'}}]\n"
        (folder / "rules.yaml").write_text(NONFINITE.replace("DOES", "skip_step") + sinks)
        done = selftest(folder, "--rules", "rules.yaml", "--link", "targets")
        assert "2 of 5 injected faults found" in done.stdout, done.stdout + done.stderr
        assert "nothing is sent" in done.stdout
    assert not got.bodies
    assert not list((folder / "targets").iterdir())


@pytest.mark.soak
def test_a_rule_that_stops_is_proven_and_the_rest_goes_on(folder: Path) -> None:
    """The training ends at the fault, as the rule says; the script is started again for the faults after it."""
    (folder / "rules.yaml").write_text(NONFINITE.replace("DOES", "stop"))
    found = faults(selftest(folder, "--rules", "rules.yaml", "--json"))
    for name in ("nan", "inf"):
        assert (found[name]["rules"], found[name]["actions"], found[name]["stopped"]) == (
            ["bad"],
            ["stop"],
            True,
        )
    assert found["spike"]["why"] == ""
    assert not found["spike"]["rules"]


@pytest.mark.soak
def test_a_short_script_leaves_faults_unproven(folder: Path) -> None:
    """What was not reached is not called found."""
    done = selftest(folder, steps=20)
    assert done.returncode == 1
    assert "the script ended after 20 steps; let it take more" in done.stdout
    assert "2 of 2 injected faults found; 3 not tried to the end" in done.stdout


@pytest.mark.soak
def test_a_script_that_ends_in_a_fault_leaves_it_unproven(folder: Path) -> None:
    """It is not called missed: there were too few steps to find it."""
    (folder / "rules.yaml").write_text(NONFINITE.replace("DOES", "skip_step"))
    done = selftest(folder, "--rules", "rules.yaml", steps=120)
    assert done.returncode == 1
    assert "the script ended while it lasted" in done.stdout
    assert done.stdout.count("MISSED") == 1


def test_a_script_that_fails_is_shown(folder: Path) -> None:
    """Exit 2, with the last lines of its own output."""
    (folder / "config").unlink()
    done = selftest(folder)
    assert done.returncode == 2
    assert "FileNotFoundError" in done.stderr
    assert "no fault was injected: no step was taken (exit status 1)" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "write: gradwatch selftest -- python train.py"),
        (("--seconds", "0", "--", "x"), "above 0"),
        (("--link", "none", "--", "x"), "--link none: there is no such file"),
        (("--", "no-such-program"), "cannot run no-such-program"),
        (("--rules", "none.yaml", "--", "x"), "none.yaml"),
    ],
)
def test_what_cannot_be_run_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    """Exit 2, with the way out, before anything is started."""
    from gradwatch.cli import main

    monkeypatch.chdir(folder)
    assert main(["selftest", *words]) == 2
    assert said in capsys.readouterr().err


def test_ranks_are_tested_together(folder: Path) -> None:
    """Two ranks under torchrun take every fault at the same step; one that is wrong alone is found, too."""
    ranks = TRAIN.replace(
        "torch.manual_seed(0)", "torch.distributed.init_process_group('gloo')\ntorch.manual_seed(0)"
    )
    ranks = ranks.replace("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ")
    (folder / "train.py").write_text(
        ranks.replace("for step", "torch.manual_seed(int(os.environ['RANK']))\nfor step")
    )
    (folder / "train.py").write_text("import os\n" + (folder / "train.py").read_text())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*GRADWATCH, "selftest", "--seconds", "120", "--json", "--", *launch, "train.py", "100000"]
    done = warm.run(command, folder, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(one["rules"] and not one["why"] for one in faults(done).values())


SCALED = (
    ("optimizer = ", "scaler = torch.amp.GradScaler('cpu')\noptimizer = "),
    ("    (model(x) - ", "    scaler.scale((model(x) - "),
    (".mean().backward()", ".mean()).backward()"),
    ("optimizer.step()", "scaler.step(optimizer); scaler.update()"),
)


def test_steps_that_a_scaler_rejects_end_a_fault(folder: Path) -> None:
    """NaN and Inf last one rejected step each; the scale is put back, and all faults are tried."""
    (folder / "train.py").write_text(_changed(TRAIN, *SCALED))
    done = selftest(folder, "--json", "--seconds", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(one["rules"] for name, one in faults(done).items() if name in FAULTS)


@pytest.mark.soak
def test_what_no_rule_says_of_rejected_steps_is_not_missed(folder: Path) -> None:
    """The scaler has kept the fault from the weights."""
    (folder / "train.py").write_text(_changed(TRAIN, *SCALED))
    (folder / "rules.yaml").write_text(NONFINITE.replace("DOES", "skip_step"))
    done = selftest(folder, "--rules", "rules.yaml", "--seconds", "30")
    assert done.stdout.count("the GradScaler rejected the step, and no rule speaks of that") == 2
    assert done.stdout.count("MISSED") == 3


def test_faults_enter_sparse_gradients(folder: Path) -> None:
    """A model of one sparse embedding, which has no other gradient."""
    (folder / "train.py").write_text(
        _changed(
            TRAIN,
            ("optimizer = torch.optim.Adam(", "optimizer = torch.optim.SparseAdam("),
            ("nn.Sequential(nn.Linear(8, 16), nn.Tanh(), ", "nn.Embedding(50, 16, sparse=True)\n_ = ("),
            ("torch.randn(16, 8)", "torch.randint(0, 50, (16, 4))"),
            (
                "(model(x) - x.norm(dim=1, keepdim=True)).square()",
                "(model(x).mean((1, 2)) - 1).square()",
            ),
        )
    )
    done = selftest(folder, "--json")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_faults_enter_the_optimizer_that_goes_on(folder: Path) -> None:
    """Not that of a probe before the training, which stays alive."""
    probe = (
        "probe = nn.Linear(8, 1); first = torch.optim.SGD(probe.parameters(), 0.1)\n"
        "for _ in range(3): probe(torch.randn(4, 8)).mean().backward(); first.step()\n"
    )
    (folder / "train.py").write_text(_changed(TRAIN, ("model = ", probe + "model = ")))
    done = selftest(folder, "--json")
    assert done.returncode == 0, done.stdout + done.stderr


OWN_LOOP = "with torch.no_grad(): [(p.sub_(p.grad, alpha=1e-3), p.grad.zero_()) for p in model.parameters()]"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            (("for step", "import gradwatch\ngw = gradwatch.watch(model, optimizer)\nfor step"),),
            "the script has a gradwatch.watch of its own",
        ),
        (
            (("optimizer.step()", OWN_LOOP), ("optimizer = ", "_ = "), ("optimizer.zero_grad()", "")),
            "no optimizer took a step, and a loop without one cannot be tested",
        ),
    ],
)
def test_the_true_reason_is_said_where_no_fault_enters(
    folder: Path, changes: tuple[tuple[str, str], ...], why: str
) -> None:
    """And no advice to look at a run that is removed."""
    (folder / "train.py").write_text(_changed(TRAIN, *changes))
    done = selftest(folder, steps=30)
    assert done.returncode == 2, done.stdout + done.stderr
    assert why in done.stderr
    assert "gradwatch report" not in done.stderr


@pytest.mark.soak
def test_a_failure_of_the_injection_is_not_the_scripts(folder: Path) -> None:
    """No exception comes out of the script's backward: the process ends, and gradwatch is named."""
    breaks = "import gradwatch.launch.fault_injection.faulty_gradients as injected\ninjected.faulty = None\nfor step"
    (folder / "train.py").write_text(_changed(TRAIN, ("for step", breaks)))
    done = selftest(folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "gradwatch itself failed (TypeError: 'NoneType' object is not callable), not the script"
        in done.stdout
    )
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_a_script_that_fails_later_is_shown(folder: Path) -> None:
    """It is not told to take more steps."""
    (folder / "train.py").write_text(_changed(TRAIN, ("    x = ", "    assert step < 20\n    x = ")))
    done = selftest(folder)
    assert "the script ended with exit status 1 after 20 steps" in done.stdout
    assert "let it take more" not in done.stdout
    assert "AssertionError" in done.stderr


def _changed(script: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    return script


def test_weights_and_state_are_put_back(tmp_path: Path) -> None:
    """Bit for bit, buffers too, into the very tensors that were there."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[]) as gw:

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()

        step()
        held = [tensor.clone() for tensor in (*model.state_dict().values(), *_state(optimizer))]
        saved = SavedState(gw._session, optimizer)
        step()
        now = [*model.state_dict().values(), *_state(optimizer)]
        assert not all(map(torch.equal, held, now))
        saved.restore()
        assert all(map(torch.equal, held, [*model.state_dict().values(), *_state(optimizer)]))
        assert [id(one) for one in now[-3:]] == [id(one) for one in _state(optimizer)[-3:]]


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]
