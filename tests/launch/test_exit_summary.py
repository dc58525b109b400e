"""The account at the end of a process: on every way out that runs Python, once, on stderr, and in the journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwatch.account.account_line import NO_TORCH
from gradwatch.cli import main
from tests.launch.test_training import run
from tests.support.launch_cases import TRAIN

COUNTED = "gradwatch: 3 of 3 steps watched · 1 optimizer, 4 parameters, coverage 100%"


@pytest.mark.parametrize(
    ("leave", "status", "ended"),
    [
        ("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)", -2, "stopped"),
        pytest.param("1 / 0", 1, "failed", marks=pytest.mark.soak),
        pytest.param("import sys\nsys.exit(3)", 3, "finished", marks=pytest.mark.soak),
        ("import code\ncode.InteractiveInterpreter().runsource('1 / 0')", 0, "finished"),
    ],
    ids=["ctrl-c", "exception", "sys.exit", "exception of a cell"],
)
def test_every_way_out_is_told_and_kept(
    leave: str, status: int, ended: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, the last one; `audit` of the run says the same, and how it ended."""
    done = run(tmp_path, f"{TRAIN}\n{leave}\n")
    assert done.returncode == status, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(COUNTED)
    assert done.stderr.count("steps watched") == 1
    assert (f" · {ended} · " in line) == (ended != "finished")
    assert line.endswith("next: gradwatch report runs/r")
    assert main(["audit", str(tmp_path / "runs" / "r"), "--json"]) == 0
    (account,) = json.loads(capsys.readouterr().out)["accounts"]
    assert account["ended"] == ended
    assert account["taken"]["backwards"] == account["watched"]["steps"] == 3


def test_an_action_that_does_not_wait_for_its_rule_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule with `for: 3` skips a NaN at once and does not fire; the log says so, and the report is not "Healthy"."""
    rules = tmp_path / "r.gradwatch.yaml"
    rules.write_text("version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [skip_step], for: 3}}\n")
    script = TRAIN.replace("mean()", "mean() * (float('nan') if _ == 1 else 1)")
    done = run(tmp_path, script, options=("--rules", str(rules)))
    assert "gradwatch acting before it fires rule=n severity=warning step=1" in done.stderr
    assert "no rule fired · done: skip_step ×1" in done.stderr.splitlines()[-1]
    assert main(["report", str(tmp_path / "runs" / "r"), "--format", "md"]) == 0
    assert "**Look at this: no rule fired in 3 recorded steps; gradwatch skipped 1" in capsys.readouterr().out


def test_a_clip_of_what_is_not_finite_is_not_said_to_be_done(tmp_path: Path) -> None:
    """NaN counts as above a bound; nothing can be clipped then, and the log says so."""
    rules = tmp_path / "r.gradwatch.yaml"
    rules.write_text(
        "version: 1\nrules: {big: {detect: {kind: above, of: total_norm, threshold: 9}, do: [clip: {to: 1}]}}\n"
    )
    script = TRAIN.replace("mean()", "mean() * (float('nan') if _ == 1 else 1)")
    done = run(tmp_path, script, options=("--rules", str(rules)))
    (line,) = (line for line in done.stderr.splitlines() if "gradwatch firing rule=big" in line)
    assert " actions=" not in line
    assert "not_done='clip (what is not finite cannot be clipped)'" in line


def test_ranks_without_a_process_group_speak_for_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What fires on the second one is logged, in its account, and in the audit of the run beside the first one's."""
    healthy = run(tmp_path, TRAIN, RANK="0", WORLD_SIZE="2")
    broken = run(tmp_path, TRAIN.replace("mean()", "mean() * float('nan')"), RANK="1", WORLD_SIZE="2")
    assert healthy.stderr.splitlines()[-1].startswith(COUNTED)
    assert "gradwatch firing rule=non-finite" in broken.stderr
    assert broken.stderr.splitlines()[-1].startswith(COUNTED.replace("3 of", "rank 1: 3 of", 1))
    assert main(["audit", str(tmp_path / "runs" / "r")]) == 0
    told = capsys.readouterr().out
    assert "  no rule fired\n" in told
    assert "  rank 1: fired: non-finite ×1; done: " in told
    assert main(["audit", str(tmp_path / "runs" / "r"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["other_ranks"]["1"]["fired"] == {"non-finite": 1}


def test_the_rank_in_the_process_group_says_who_prints(tmp_path: Path) -> None:
    """A launcher's RANK may be another: here that of a process whose group has no other member."""
    store = f"torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/s', rank=0, world_size=1)"
    done = run(
        tmp_path, TRAIN.replace("import torch\n", f"import torch\n{store}\n", 1), RANK="1", WORLD_SIZE="2"
    )
    assert done.stderr.splitlines()[-1].startswith("gradwatch: ")
    assert "3 of 3 steps watched" in done.stderr.splitlines()[-1]


def test_ranks_that_call_themselves_so_later_are_told_once(tmp_path: Path) -> None:
    """As the tutorial of DistributedDataParallel does: spawned processes put their rank into their own environment."""
    script = """import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def work(rank, ranks, place):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (2, os.path.abspath("store")), 2)
"""
    done = run(tmp_path, script)
    assert [line.count("3 of 3 steps watched") for line in done.stderr.splitlines() if "watched" in line] == [
        1
    ]


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a group"])
def test_a_process_that_is_called_rank_1_speaks_for_what_it_has_started(
    grouped: bool, tmp_path: Path
) -> None:
    """RANK may be the number of a pod; what it starts is in no group, or in one whose rank 0 it has started, too."""
    script = tmp_path / "train.py"
    ranks = "rank=int(os.environ['AS']), world_size=2"
    join = f"torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/s', {ranks})"
    script.write_text(TRAIN.replace("import torch\n", f"import os, torch\n{join if grouped else ''}\n", 1))
    starting = (
        "import os, subprocess, sys\n"
        "both = [subprocess.Popen([sys.executable, 'train.py'], env={**os.environ, 'AS': str(rank)})"
        f" for rank in range(1, {0 - grouped}, -1)]\n"
        "sys.exit(max(one.wait() for one in both))\n"
    )
    done = run(tmp_path, starting, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("gradwatch: 3 of 3 steps watched")
    assert done.stderr.count(" steps watched") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["report", "--format", "md", "RUN"],
        ["audit", "RUN"],
        ["explain", "--run", "RUN"],
        ["backtest", "--rules", "default", "RUN"],
    ],
    ids=lambda words: words[0],
)
def test_the_next_command_of_a_process_with_another_rank(
    command: list[str], run_of_rank_one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod that its launcher calls 1 has no journal of rank 0: every command takes the lowest there is."""
    code = main([str(run_of_rank_one) if word == "RUN" else word for word in command])
    assert code == (command[0] == "explain")  # nothing fired
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def run_of_rank_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process, which has RANK=1."""
    folder = tmp_path_factory.mktemp("rank-one")
    done = run(folder, TRAIN, RANK="1", WORLD_SIZE="2")
    assert done.stderr.splitlines()[-1].endswith("next: gradwatch report runs/r")
    return folder / "runs" / "r"


@pytest.mark.soak
def test_a_process_that_trains_nothing_is_told_once(tmp_path: Path) -> None:
    """By the launched process, not by its DataLoader's workers; and `--quiet` says nothing."""
    script = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    for batch in DataLoader(list(range(8)), num_workers=2):
        print(batch)
"""
    assert run(tmp_path, script).stderr == (
        "gradwatch: no training seen in this process (0 backwards, 0 steps)\n"
    )
    assert run(tmp_path, script, options=("--quiet",)).stderr == ""


@pytest.mark.parametrize("flag", ["-I", pytest.param("-E", marks=pytest.mark.soak)])
def test_a_launch_whose_training_is_left_to_an_isolated_python_says_that_nothing_was_seen(
    flag: str, tmp_path: Path
) -> None:
    """It trains as bare, leaves no journal, and the process that started it says so in one line.

    Without an optimizer, whose first one imports dynamo: watched, its backward would be told of.
    """
    backward = "weight = torch.ones(1, requires_grad=True)\n(weight * 2).sum().backward()\n"
    (tmp_path / "train.py").write_text(f"import torch\n{backward}print('loss', weight.grad.item())\n")
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, {flag!r}, 'train.py'], check=True)"
    done = run(tmp_path, script, fresh=True)
    assert done.stdout.startswith("loss ")
    assert done.stderr == NO_TORCH + "\n"
    assert not (tmp_path / "runs" / "r").exists()


def test_a_launch_that_left_the_training_to_others_tells_of_these(tmp_path: Path) -> None:
    """A process without torch speaks for the Pythons that it starts as usual."""
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(tmp_path, "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'], check=True)")
    assert done.stderr.startswith("gradwatch: 3 of 3 steps watched")
    assert done.stderr.count("\n") == 1
