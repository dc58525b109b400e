"""Processes that end by `os._exit` under `gradwatch run`: as bare, but for the account and the end of the journal."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.launch import os_exit
from tests.launch.test_training import execute_warm, run
from tests.support.launch_cases import TRAIN

COUNTED = "gradwatch: 3 of 3 steps watched · 1 optimizer, 4 parameters, coverage 100%"
LOOP = """
import os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def step():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
def leave(*_):
    os._exit(7)
signal.signal(signal.SIGINT, leave)
for _ in range(4):
    step()
"""


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines of gradwatch's on stderr."""
    return [line for line in done.stderr.splitlines() if line.startswith("gradwatch: ")]


def account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """The account in the journal of the run, which has an end."""
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "runs" / "r"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["accounts"]
    assert isinstance(found, dict)
    return found


LEAVING = {
    "at the end": "os._exit(7)",
    "in a handler of the interpreter's exit": "import atexit; atexit.register(os._exit, 7)",
    "in a thread, the first one waiting": "threading.Thread(target=leave).start(); time.sleep(60)",
    "by Ctrl-C, between steps": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "by Ctrl-C, in the forward": (
        "model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT)); step(); time.sleep(60)"
    ),
    "with a thread that trains on": (
        "threading.Thread(target=lambda: [step() for _ in iter(int, 1)], daemon=True).start(); os._exit(7)"
    ),
    "in a destructor": (
        "A = type('A', (), {'__del__': lambda self, leave=os._exit: leave(7)}); A(); time.sleep(60)"
    ),
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_the_account_of_a_process_that_leaves_at_once(
    leave: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Its status, one line, the last one, and a journal that ends; what the script has not flushed stays unwritten."""
    script = LOOP + f"print('lost')\nsys.stderr.write('lost')\nos.write(2, b'theirs, ')\n{leave}\n"
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert done.stderr.startswith("theirs, gradwatch: ")
    _, *further = done.stderr.splitlines()
    if "trains on" in request.node.callspec.id:  # its last backward may have been under way
        further = [line for line in further if "1 of" not in line or "did not get that far" not in line]
    assert not further
    found = account(tmp_path, capsys)
    taken = found["taken"]
    assert isinstance(taken, dict)
    assert f"{taken['steps']} of {taken['steps']} steps watched" in done.stderr
    assert taken["steps"] >= 4


INSIDE = """
left = [int(sys.argv[1])]
import importlib.util
ours = os.path.dirname(importlib.util.find_spec("gradwatch").origin) + os.sep
def traced(frame, event, arg):
    if not frame.f_code.co_filename.startswith(ours):
        return None
    left[0] -= 1
    if left[0] == 0:
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)
    return traced
sys.settrace(traced)
step()
sys.settrace(None)
print("not reached")
os._exit(8)
"""


@pytest.mark.parametrize(
    "line", [1, 60, 300, *(pytest.param(n, marks=pytest.mark.soak) for n in range(10, 1200, 17))]
)
def test_a_signal_handler_leaves_in_the_midst_of_gradwatchs_own_code(line: int, tmp_path: Path) -> None:
    """Whatever that code was about, and whatever lock it held, the process ends by the handler's status and account."""
    done = run(tmp_path, LOOP + INSIDE, str(line))
    assert done.returncode == 7, done.stderr
    (first, *missed) = lines(done)
    watched, taken = first.removeprefix("gradwatch: ").split(" steps watched")[0].split(" of ")
    assert (watched, taken) in {("4", "4"), ("4", "5"), ("5", "5")}
    assert watched == taken or "1 of 5 optimizer steps not watched: 1 step ended by" in missed[0]
    for each in missed:  # of what was interrupted
        assert "backwards reached no parameter" in each or each.endswith(("os._exit", "or os._exit, ended"))


def test_the_interrupted_line_may_be_far_into_a_step(tmp_path: Path) -> None:
    """A step has so many lines that the interrupts above hit one, and an end."""
    assert run(tmp_path, LOOP + INSIDE, "100000").returncode == 8


HELD = """
import gradwatch.launch.os_exit as os_exit
os_exit.LONGEST[0] = 0.2
from gradwatch.sinks import journal
(sink,) = journal._live
held = threading.Event()
def hold():
    with sink._lock:
        held.set()
        time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
"""


@pytest.mark.parametrize("leave", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"])
def test_a_lock_that_another_thread_holds_does_not_keep_the_process(leave: str, tmp_path: Path) -> None:
    """The journal cannot be ended; the process ends with its status all the same, after the deadline."""
    done = run(tmp_path, f"{LOOP}{HELD}{leave}\n")
    assert done.returncode == 7, done.stderr


def test_a_lock_that_the_interrupted_code_holds_does_not_keep_the_process(tmp_path: Path) -> None:
    """The handler runs while its own thread holds the lock that the account needs."""
    held = HELD.split("held = ")[0] + "sink._lock.acquire()\n"
    inside = "exec(compile('leave()', os_exit.__file__.replace('os_exit', 'auto_watch'), 'exec'))\n"
    done = run(tmp_path, LOOP + held + inside)
    assert done.returncode == 7, done.stderr


EXEC = """
step()
if "again" not in sys.argv:
    for wrong in (("/no/such", ["x"]), ("/etc/passwd", ["x"]), (3.5, ["x"]), ("python-none", ["x"])):
        try:
            os.execvp(*wrong) if wrong[0] == "python-none" else os.execv(*wrong)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    EXECUTE
print("second", flush=True)
"""
EXECS = {
    "execv": "os.execv(sys.executable, [sys.executable, sys.argv[0], 'again'])",
    "execve": "os.execve(sys.executable, [sys.executable, sys.argv[0], 'again'], os.environ)",
    "execlp": "os.execlp(sys.executable, sys.executable, sys.argv[0], 'again')",
    "to a shell": "os.execlp('sh', 'sh', '-c', 'echo second')",
    "without torch": "os.execv(sys.executable, [sys.executable, '-c', 'print(\\'second\\')'])",
}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=[pytest.mark.soak] if name in ("execve", "execlp") else [])
        for name, call in EXECS.items()
    ],
)
def test_a_process_that_another_program_takes_the_place_of_has_its_account(call: str, tmp_path: Path) -> None:
    """What each image has trained is in one line of its own; calls that fail raise as bare, and nothing is said."""
    script = LOOP + EXEC.replace("EXECUTE", call)
    done = run(tmp_path, script)
    # Its second image has only to print: it is a cold Python.
    (tmp_path / "bare.py").write_text(
        "import sys\nif 'again' in sys.argv: sys.exit(print('second'))\n" + script
    )
    bare = execute_warm([sys.executable, "bare.py"], tmp_path)
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout), done.stderr
    images = 2 if "again" in call else 1
    told = [line.split(" · ")[0] for line in lines(done) if "baselines" not in line]
    assert told == ["gradwatch: 5 of 5 steps watched"] * images


FAILS = """
import stat
broken = os.path.abspath("broken")
with open(broken, "w") as file:
    file.write("no program")
os.chmod(broken, 0o755)
try:
    os.execv(broken, [broken])
except OSError as error:
    print(type(error).__name__, flush=True)
step()
"""


def test_a_script_that_goes_on_after_all_has_its_account_at_its_end(tmp_path: Path) -> None:
    """The call fails at the last moment: what was trained after it is told as not watched."""
    done = run(tmp_path, LOOP + FAILS)
    assert (done.returncode, done.stdout) == (0, "OSError\n"), done.stderr
    assert [line.split(" · ")[0] for line in lines(done)][:2] == [
        "gradwatch: 4 of 4 steps watched",
        "gradwatch: 4 of 5 steps watched",
    ]
    assert "1 of 5 optimizer steps not watched" in done.stderr


FORKS = """
import multiprocessing, pickle
from torch.utils.data import DataLoader
def status(work):
    child = os.fork()
    if child == 0:
        work()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def train():
    step()
    os._exit(5)
fork = multiprocessing.get_context("fork")
one = fork.Process(target=os._exit, args=(4,))
one.start()
one.join()
print(status(lambda: os._exit(3)), one.exitcode, status(train), flush=True)
print(pickle.loads(pickle.dumps(os._exit)) is os._exit, os._exit.__name__, flush=True)
for batch in DataLoader(torch.arange(4), num_workers=2, persistent_workers=True):
    print(batch, flush=True)
for wrong in ((), (1, 2), ("1",), (2 ** 40,)):
    try:
        os._exit(*wrong)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
os._exit(status=9)
"""


def test_children_leave_as_bare_and_are_in_the_account(tmp_path: Path) -> None:
    """Forked children and workers print no account; one that trains is in the sum; wrong calls raise as bare."""
    done = run(tmp_path, LOOP + FORKS)
    (tmp_path / "bare.py").write_text(LOOP + FORKS)
    bare = execute_warm([sys.executable, "bare.py"], tmp_path)
    assert (done.returncode, done.stdout) == (bare.returncode, bare.stdout), done.stderr
    (line,) = (line for line in lines(done) if "steps watched" in line)
    assert line.startswith("gradwatch: 5 of 5 steps watched in 2 processes")
    assert done.stderr.endswith(line + "\n")


DAEMON = """
import os, sys, torch
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
"""


def test_a_daemon_prints_one_account(tmp_path: Path) -> None:
    """The two processes that only fork print nothing."""
    done = run(tmp_path, DAEMON + TRAIN + "os._exit(2)\n")
    assert done.returncode == 0
    (line,) = lines(done)
    assert line.startswith(COUNTED)


RANKS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    o = torch.optim.SGD(m.parameters(), 0.1)
    for _ in range(3):
        m(torch.ones(2, 4)).square().mean().backward()
        o.step()
    dist.barrier()
    os._exit(0)

if __name__ == "__main__":
    first = os.fork()
    train(0 if first else 1)
"""


def test_one_rank_prints_the_account(tmp_path: Path) -> None:
    """Both ranks leave by `os._exit`; the first one speaks."""
    done = run(tmp_path, RANKS)
    assert done.returncode == 0, done.stderr
    (line,) = lines(done)
    assert line.startswith("gradwatch: 3 of 3 steps watched")


def test_a_process_that_has_trained_nothing_leaves_as_bare(tmp_path: Path) -> None:
    """Nothing is printed where torch was imported and nothing trained; nor with `--quiet` where something was."""
    assert run(tmp_path, "import os, torch\nos._exit(4)\n").stderr == ""
    assert run(tmp_path, TRAIN + "import os\nos._exit(4)\n", options=("--quiet",)).stderr == ""


def test_what_does_not_end_the_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `os._exit` was replaced by what may return, no account is given: the process may go on."""
    calls: list[object] = []
    monkeypatch.setattr("os._exit", calls.append)
    monkeypatch.setattr("gradwatch.launch.exit_summary.owed", lambda: True)
    remove = os_exit.listen(calls.append)
    try:
        os._exit(3)
    finally:
        remove()
    assert calls == [3]


def test_the_call_is_pickled_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to a worker names `os._exit`, whichever function stands there."""
    remove = os_exit.listen(print)
    try:
        assert b"gradwatch" not in pickle.dumps(os._exit)
    finally:
        remove()
