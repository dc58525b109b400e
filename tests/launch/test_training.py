"""Real trainings under `gradwatch run`: found, named, unchanged; off when off; a script's own watch wins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.journal import read_journal
from tests.support import warm
from tests.support.launch_cases import GRADWATCH, TRAIN

IMAGES = """
import hashlib, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
images = torch.rand(500, 1, 8, 8)
labels = (images.mean((1, 2, 3)) * 40).long() % 10
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(inplace=True),
    torch.nn.Flatten(), torch.nn.Dropout(0.25), torch.nn.Linear(256, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(int(sys.argv[1])):
    batch = torch.randint(len(images), (32,))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
digest = hashlib.sha256()
for value in [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]:
    digest.update(value.numpy().tobytes())
print(digest.hexdigest(), torch.rand(1).item(), sys.argv)
if "gradwatch" in sys.modules:  # its end is not held up by a scraper that stays connected
    import socket
    from urllib.parse import urlsplit
    from gradwatch.launch import auto_watch
    at = urlsplit(auto_watch._watches[0].url)
    scraper = socket.create_connection((at.hostname, at.port))
import logging, signal, warnings
print([signal.getsignal(each) for each in (2, 15, 10)], sys.excepthook, sys.displayhook, logging.root.handlers)
print([each[:3] for each in warnings.filters], torch.get_default_dtype())
sys.exit(3)
"""

INSPECT = """
import sys, threading, torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
hooked = sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())
print(len(hooks), hooked, threading.active_count(), any(m.startswith("gradwatch") for m in sys.modules))
"""


def run(
    tmp_path: Path,
    script: str,
    *argv: str,
    options: tuple[str, ...] = (),
    python: tuple[str, ...] = (),
    fresh: bool = False,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """`gradwatch run OPTIONS -- python PYTHON x.py ARGV`, journal under tmp_path/runs.

    `fresh`: in a Python of its own, for what a process that has torch already cannot show (`tests.support.warm`).
    """
    (tmp_path / "x.py").write_text(script)
    launcher = [
        *GRADWATCH,
        "run",
        "--dir",
        str(tmp_path / "runs"),
        "--run-id",
        "r",
        "--listen",
        "127.0.0.1:0",
    ]
    command = [*launcher, *options, "--", sys.executable, *python, "x.py", *argv]
    return (execute if fresh else execute_warm)(command, tmp_path, **env)


def environment(**env: str) -> dict[str, str]:
    """An environment without what the test run itself was started with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWATCH", "PYTHON"))}
    return {**kept, "OMP_NUM_THREADS": "1", **env}


def execute(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One process, started as a shell would."""
    return subprocess.run(
        command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=250
    )


def execute_warm(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The same, forked from a Python that has imported torch."""
    return warm.run(command, cwd, environment(**env))


def watched_names(tmp_path: Path, rank: int = 0) -> tuple[str, ...]:
    """The parameters that the journal of a rank says were watched."""
    journal = next(each for each in read_journal(tmp_path / "runs" / "r") if each.rank == rank)
    return next(journal.records()).record.snapshot.sites.names


def test_a_convolutional_network_trains_to_the_same_bits(tmp_path: Path) -> None:
    """Losses, weights, optimizer and random state, argv and exit status are a bare run's; also handlers (P9).

    It ends with a live watch, an open endpoint and a connected scraper (P8): a hang would run into the timeout.
    """
    watched = run(tmp_path, IMAGES, "40", "--flag", options=("--quiet",))
    bare = execute_warm([sys.executable, "x.py", "40", "--flag"], tmp_path)
    assert (watched.returncode, watched.stdout, watched.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert bare.returncode == 3
    assert len(bare.stdout.splitlines()) == 43
    assert watched_names(tmp_path)[:2] == ("0.weight", "0.bias")
    (journal,) = read_journal(tmp_path / "runs" / "r")
    assert [recorded.record.snapshot.step for recorded in journal.records()] == list(range(40))
    assert journal.complete


def test_off_means_off(tmp_path: Path) -> None:
    """With GRADWATCH=0 there is no hook, no thread, no module and no file of ours (P40)."""
    done = run(tmp_path, TRAIN + INSPECT, GRADWATCH="0")
    assert done.stdout.splitlines()[-1] == "0 0 1 False"
    assert not (tmp_path / "runs").exists()


def test_on_means_on_until_the_script_watches_itself(tmp_path: Path) -> None:
    """The same look sees hooks, threads and modules; gradwatch.watch after the first step takes over."""
    script = (
        TRAIN
        + INSPECT
        + (
            "import gradwatch\nfrom gradwatch.launch import auto_watch\nfirst = auto_watch._watches[0]\n"
            "gw = gradwatch.watch(model, sinks=[])\nprint(not first.closed, gw.status()['active'])"
        )
    )
    done = run(tmp_path, script)
    hooks, hooked, threads, imported = done.stdout.splitlines()[-2].split()
    assert (hooks, imported) == ("1", "True")
    assert int(hooked) > 0
    assert int(threads) > 1
    assert done.stdout.splitlines()[-1] == "False True", done.stderr


def test_nothing_is_armed_without_a_backward(tmp_path: Path) -> None:
    """A process that imports torch and only runs forward starts no thread and loads no sink."""
    script = (
        "\n".join(line for line in TRAIN.splitlines() if "optimizer" not in line and "backward" not in line)
        + INSPECT
        + "print([m for m in sys.modules if 'sinks' in m])"
    )
    done = run(tmp_path, script)
    assert done.stdout.splitlines()[-2].split()[1:3] == ["0", "1"]
    assert done.stdout.splitlines()[-1] == "[]"
    assert not (tmp_path / "runs").exists()


def test_the_scripts_own_watch_wins(tmp_path: Path) -> None:
    """A script that calls gradwatch.watch before its first step is watched once, by its own watch."""
    before, after = TRAIN.split("for _ in range(3):")
    script = (
        f"import gradwatch\n{before}gw = gradwatch.watch(model, sinks=[])\nfor _ in range(3):{after}"
        "from gradwatch.launch import auto_watch\nprint(auto_watch._watches, gw.status()['steps'])"
    )
    done = run(tmp_path, script)
    assert done.stdout.splitlines()[-1] == "[] 3", done.stderr


def test_two_optimizers_share_one_watch(tmp_path: Path) -> None:
    """A GAN-like pair of models is found whole at the first step of either optimizer, names prefixed."""
    script = """
import torch
class G(torch.nn.Linear): pass
class D(torch.nn.Linear): pass
g, d = G(2, 2), D(2, 1)
og, od = (torch.optim.SGD(m.parameters(), lr=.1) for m in (g, d))
for _ in range(3):
    for o in (od, og):
        o.zero_grad(); d(g(torch.ones(1, 2))).sum().backward(); o.step()
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    names = {
        name
        for recorded in read_journal(tmp_path / "runs" / "r")[0].records()
        for name in recorded.record.snapshot.sites.names
    }
    assert names == {"G.weight", "G.bias", "D.weight", "D.bias"}


def test_a_frozen_garbage_collector_and_a_copied_model_keep_their_names(tmp_path: Path) -> None:
    """Modules are known by torch's events: gc.freeze() hides nothing, and an unpickled model passed __setstate__."""
    twin = "import copy, gc; model = copy.deepcopy(model); "
    twin += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1); gc.freeze()\nfor _"
    done = run(tmp_path, TRAIN.replace("for _", twin))
    assert done.returncode == 0, done.stderr
    assert watched_names(tmp_path) == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_parameters_without_a_module_are_named_by_their_optimizer(tmp_path: Path) -> None:
    """Bare tensors: the names given to the optimizer, else its number, the param group, the place and the shape."""
    script = """
import torch
a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
for optimizer in (torch.optim.SGD([a], 0.1), torch.optim.SGD([("mine", b)], 0.1)):
    for _ in range(2):
        (a * b).sum().backward()
        optimizer.step()
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    (journal,) = read_journal(tmp_path / "runs" / "r")
    names = {recorded.record.snapshot.sites.names for recorded in journal.records()}
    assert names == {("opt0.group0.0[3]",), ("mine",)}


@pytest.mark.parametrize("flag", ["-E", pytest.param("-I", marks=pytest.mark.soak)])
def test_python_that_ignores_pythonpath_is_watched_in_process(tmp_path: Path, flag: str) -> None:
    """`python -E/-I x.py` goes through isolated_python.py, says so, and keeps argv, __main__ and exit status."""
    script = (
        TRAIN + "import sys, pickle\nclass A: pass\npickle.dumps(A())\nprint(sys.argv, __name__)\nsys.exit(4)"
    )
    done = run(tmp_path, script, "a", "-b", python=(flag,), fresh=True)
    assert done.stdout.splitlines()[-1] == "['x.py', 'a', '-b'] __main__"
    assert done.returncode == 4
    assert f"python {flag} ignores PYTHONPATH" in done.stderr
    assert watched_names(tmp_path)[0] == "0.weight"


def test_a_policy_that_cannot_be_carried_out_is_off_by_itself(tmp_path: Path) -> None:
    """The script is watched without it, and stderr says why, at the start and in the account."""
    rules = tmp_path / "none.gradwatch.yaml"
    rules.write_text("version: 1\nclip: {total: {method: autoclip, scope: param, history: 100000000}}\n")
    done = run(tmp_path, TRAIN + "import sys; sys.exit(6)", options=("--rules", str(rules)))
    assert done.returncode == 6
    started, account = done.stderr.splitlines()
    assert "autoclip would keep" in started
    assert re.match(r"gradwatch: (\d+) of \1 steps watched", account)
    assert "not armed: clip:total (autoclip would keep" in account


def test_strict_rules_refuse_it_before_the_first_step(tmp_path: Path) -> None:
    """With --strict-rules the script ends with status 2, and the reason on stderr."""
    rules = tmp_path / "none.gradwatch.yaml"
    rules.write_text("version: 1\nclip: {total: {method: autoclip, scope: param, history: 100000000}}\n")
    done = run(tmp_path, TRAIN + "print('trained')", options=("--rules", str(rules), "--strict-rules"))
    assert (done.returncode, "trained" in done.stdout) == (2, False)
    assert "autoclip would keep" in done.stderr
