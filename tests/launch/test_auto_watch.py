"""Who is watched under `gradwatch run`: optimizers and their parameters, whatever becomes of the modules."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.checkpoint import read_tag
from gradwatch.journal import read_journal
from gradwatch.launch.resumed_baselines import Baselines
from gradwatch.launch.state_lock import FORKED, TAKEN, StateLock
from gradwatch.records.run_info import RunInfo
from gradwatch.report.live.journal_source import JournalSource
from gradwatch.report.run_reader import load
from gradwatch.session.watch import session_of
from tests.deploy.run_folders import scan
from tests.launch.test_training import run

NET = """
import copy, gc, os, sys, warnings, weakref
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
"""


def steps(tmp_path: Path) -> list[list[int]]:
    """The recorded steps of every journal of the run, in the order of its attempts."""
    return [
        [one.record.snapshot.step for one in journal.records()]
        for journal in read_journal(tmp_path / "runs" / "r")
    ]


def ended(done: subprocess.CompletedProcess[str]) -> str:
    """What a script that ended well printed."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models_may_be_wrapped_for_a_forward_replaced_deleted_and_made_anew(tmp_path: Path) -> None:
    """A passing wrapper renames nothing, an assigned checkpoint is healed, and what is deleted is freed."""
    script = (
        NET
        + """
class Wrap(nn.Module):
    def __init__(self, f):
        super().__init__(); self.base_func = f
    def forward(self, x): return self.base_func(x)

net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def train(n, nan=-1):
    for t in range(n):
        w = Wrap(net)
        warnings.warn("once, please")
        loss = w(torch.randn(8, 4)).pow(2).mean() * (float("nan") if t == nan else 1)
        opt.zero_grad(); loss.backward(); opt.step()
train(8, 5)
net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
opt = torch.optim.SGD(net.parameters(), 0.05)
train(8, 5)
other = nn.Linear(8, 8)
second = torch.optim.SGD(other.parameters(), 0.1)
other(torch.ones(1, 8)).sum().backward(); second.step(); second.zero_grad()
gone = weakref.ref(other.weight)
del other, second
nn.Linear(1, 1)  # no step is needed: memory is wanted when the next model is built
freed = gone() is None
train(2)
print(freed, all(bool(p.isfinite().all()) for p in net.parameters()))
"""
    )
    done = run(tmp_path, script)
    assert ended(done).split() == ["True", "True"]
    assert done.stderr.count("once, please\n  warnings.warn") == 1
    (journal,) = read_journal(tmp_path / "runs" / "r")
    records = [one.record for one in journal.records()]
    mine = [one for one in records if one.snapshot.optimizer == 0]
    assert [one.snapshot.step for one in mine] == list(range(18))
    assert [one.snapshot.step for one in records if one.decision.skip] == [5, 13]
    assert {name for one in mine for name in one.snapshot.sites.names} == {"weight", "bias"}


def test_a_scaler_that_rejects_every_step_is_watched(tmp_path: Path) -> None:
    """No optimizer ever steps: the rejected steps are recorded, and the collapse of the scale is told."""
    script = (
        NET
        + """
m = nn.Linear(4, 1)
o = torch.optim.SGD(m.parameters(), 0.01)
s = torch.amp.GradScaler("cpu")
for t in range(40):
    o.zero_grad()
    s.scale(m(torch.full((8, 4), float("inf"))).pow(2).mean()).backward()
    s.step(o)
    s.update()
"""
    )
    done = run(tmp_path, script)
    ended(done)
    assert steps(tmp_path) == [list(range(40))]
    assert "rule=scale-collapse" in done.stderr


def test_the_scaling_of_the_loss_attaches(tmp_path: Path) -> None:
    """`scaler.scale` comes before the backward, and what starts that one may not be Python: it is watched already."""
    script = """
import torch
from gradwatch.session.live_sessions import LIVE
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu")
loss = net(torch.ones(8, 4)).pow(2).mean()
print(len(LIVE.all()))
scaler.scale(loss)
print(len(LIVE.all()))
"""
    assert ended(run(tmp_path, script)) == "0\n1\n"


def test_an_interrupt_in_an_attach_does_not_end_the_watching(tmp_path: Path) -> None:
    """Ctrl-C at whichever line of it, in a notebook, say: the next optimizer is watched as ever."""
    script = """
import torch, sys
from gradwatch.session.live_sessions import LIVE
hit = set()
def line(frame, event, arg):
    if event == "line" and frame.f_code.co_name in ("attach_waiting", "_attach_to") and frame.f_lineno not in hit:
        hit.add(frame.f_lineno)
        raise KeyboardInterrupt
    return line
def train(steps):
    net = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(steps):
        net(torch.ones(8, 4)).pow(2).mean().backward()
        opt.step()
interrupted = True
while interrupted:
    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename.endswith("auto_watch.py") else None)
    try:
        train(1)
        interrupted = False
    except KeyboardInterrupt:
        pass
    sys.settrace(None)
    before = sum(watch.steps for watch in LIVE.all())
    train(3)
    if sum(watch.steps for watch in LIVE.all()) != before + 3:
        print("blind after", hit)
print(len(hit) >= 8)
"""
    assert ended(run(tmp_path, script)) == "True\n"


@pytest.mark.parametrize("localises", [True, False])
def test_calls_are_recorded_only_for_a_watch_that_runs_them_again(tmp_path: Path, localises: bool) -> None:
    """The calls of a model that comes later are recorded before its first backward, where some rule localises."""
    rules = tmp_path / "rules.yaml"
    action = ", do: [localise]" if localises else ""
    rules.write_text(f"version: 1\nrules: {{n: {{detect: {{kind: nonfinite}}{action}}}}}\n", encoding="utf-8")
    script = """
import copy, torch
from gradwatch.launch import auto_watch
net = torch.nn.Linear(4, 1)
for _ in range(2):
    own = copy.deepcopy(net)
    opt = torch.optim.SGD(own.parameters(), 0.01)
    print(auto_watch._agents[0]._forwards.has_calls)
    own(torch.ones(8, 4)).pow(2).mean().backward()
    opt.step()
"""
    assert ended(run(tmp_path, script, options=("--rules", str(rules)))) == f"True\n{localises}\n"


def test_a_forked_child_that_trains_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    """Hogwild: the parent's steps in one journal, the child's in another, and the same numbers as unwatched."""
    script = (
        NET
        + """
import torch.multiprocessing as mp
m = nn.Linear(4, 1).share_memory()
o = torch.optim.SGD(m.parameters(), 0.01)
def train(n):
    for _ in range(n):
        o.zero_grad(); m(torch.randn(8, 4)).pow(2).mean().backward(); o.step()
if __name__ == "__main__":
    train(4)
    p = mp.get_context("fork").Process(target=train, args=(8,))
    p.start(); p.join(); train(2)
    print("done", p.exitcode)
"""
    )
    assert ended(run(tmp_path, script)) == "done 0\n"
    journals = list(read_journal(tmp_path / "runs" / "r"))
    assert sorted(len(list(journal.records())) for journal in journals) == [6, 8]
    assert all(journal.complete for journal in journals)


SEVERAL = (
    NET
    + """
import json, signal
from pathlib import Path
from typing import Any
def train(n):
    m = nn.Linear(4, 1)
    o = torch.optim.SGD(m.parameters(), 0.01)
    for _ in range(n):
        o.zero_grad(); m(torch.randn(8, 4)).pow(2).mean().backward(); o.step()
    return m, o
kept = train(4)
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    kept = train(8)
    os.write(w, b"1")
    signal.pause()
os.read(r, 1)
found = [json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("endpoint-rank*.json"))]
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(sorted((one["place"], one["pid"] == os.getpid(), one["pid"] == pid) for one in found))
print(len({one["port"] for one in found}))
if sys.argv[2] == "killed":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_a_forked_child_that_trains_is_a_process_of_its_own_to_serve(tmp_path: Path) -> None:
    """Parent and child have endpoints of their own; killed and started again both have their places again."""
    folder = tmp_path / "runs" / "r"
    told = "[(0, True, False), (1, False, True)]\n2\n"
    assert run(tmp_path, SEVERAL, str(folder), "killed", fresh=True).stdout == told
    assert run(tmp_path, SEVERAL, str(folder), "ends", fresh=True).stdout == told
    owners = [journal.run() for journal in read_journal(folder)]
    assert [None if one is None else one.run.place for one in owners] == [0, 1, 0, 1]
    states = {member.place: member.state for member in scan(tmp_path / "runs").members}
    assert states == {0: "finished", 1: "died"}


RESUMED = (
    NET
    + """
def main():
    m = nn.Linear(4, 1)
    o = torch.optim.Adam(m.parameters(), 0.01)
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt")
        m.load_state_dict(saved[0]); o.load_state_dict(saved[1])
    for t in range(6):
        o.zero_grad(); m(torch.randn(8, 4)).pow(2).mean().backward(); o.step()
    torch.save((m.state_dict(), o.state_dict()), "saved.pt")
    return o
if os.path.exists("saved.pt"):
    main()  # the optimizer is gone when the process ends
else:
    o = main()
"""
)


def test_a_job_started_again_takes_up_its_baselines(tmp_path: Path) -> None:
    """The second attempt goes on at step 6; without its checkpoint it begins at 0 and says why.

    What is saved is the same whether the optimizer is alive at the end or was a function's.
    """
    ended(run(tmp_path, RESUMED))
    kept = []
    for _ in range(2):
        state = json.loads((tmp_path / "runs" / "r" / "state-rank0.json").read_text(encoding="utf-8"))
        kept.append(state["lanes"]["0"])
        if len(kept) == 1:
            assert "baselines" not in run(tmp_path, RESUMED).stderr
    assert kept == [{**kept[0], "counted": 6}, {**kept[0], "counted": 12}]
    (tmp_path / "saved.pt").unlink()
    again = run(tmp_path, RESUMED)
    assert (
        "baselines saved in the folder of the run are not used: the optimizer has taken no step"
        in again.stderr
    )
    assert steps(tmp_path) == [list(range(6)), list(range(6, 12)), list(range(6))]


def test_a_job_that_goes_back_behind_its_baselines_is_told(tmp_path: Path) -> None:
    """Resumed from a checkpoint older than what was saved of the rules: steps are counted on, and one line says so."""
    ended(run(tmp_path, RESUMED))
    older = (tmp_path / "saved.pt").read_bytes()
    assert "counted on" not in run(tmp_path, RESUMED).stderr
    (tmp_path / "saved.pt").write_bytes(older)
    said = "the baselines were saved at step 12 and the optimizer has taken 6 steps: steps are counted on from 12"
    assert said in run(tmp_path, RESUMED).stderr
    assert steps(tmp_path) == [list(range(6)), list(range(6, 12)), list(range(12, 18))]


@pytest.mark.parametrize("saved_after", [2, 3])
def test_weights_of_before_a_poisoned_step_are_not_held_against_a_resumed_job(
    tmp_path: Path, saved_after: int
) -> None:
    """The optimizer's own count says which steps are in the weights: of step 2 it was poisoned, and of no earlier."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    healthy: list[bool] = []
    resumed: dict[str, Any] = {}
    for attempt in range(2):
        with gradwatch.watch(
            model, optimizer, rules="observe-only", run_dir=tmp_path, run_id="r", sinks=[]
        ) as gw:
            (tmp_path / "r").mkdir(exist_ok=True)
            baselines = Baselines(session_of(gw))
            for step in range(5):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                if not attempt and step == 2:
                    model.weight.grad[0, 0] = float("nan")  # type: ignore[index]
                baselines.before_step(optimizer)
                optimizer.step()
                if step + 1 == saved_after and not attempt:
                    resumed = copy.deepcopy(optimizer.state_dict())
            healthy.append(gw.healthy)
            baselines.save()
            baselines.leave_to_parent()
        model = nn.Linear(2, 1)  # of a checkpoint whose weights are finite
        optimizer = torch.optim.Adam(model.parameters())
        for state in resumed["state"].values():
            state.update({name: torch.zeros_like(state[name]) for name in ("exp_avg", "exp_avg_sq")})
        optimizer.load_state_dict(resumed)
    assert healthy == [False, saved_after == 2]


RUINED = """
for trial in range(3):
    if trial < {trials}:
        net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for t in range(120):
        opt.zero_grad(); net(torch.randn(8, 4)).pow(2).mean().backward(); opt.step()
    if trial == 0:
        net.weight.data[0, 0] = float("nan")
"""


@pytest.mark.parametrize("trials", [2, 1])
def test_what_was_wrong_with_weights_that_others_replace_is_kept(tmp_path: Path, trials: int) -> None:
    """The tag is about the weights trained now, the verdict about all; another optimizer of the same replaces none."""
    done = run(tmp_path, NET + RUINED.format(trials=trials), options=("--rules", "observe-only"))
    ended(done)
    folder = tmp_path / "runs" / "r"
    said = "weights replaced that were not healthy: weights are not finite: weight ×1"
    assert (said in done.stderr) == (trials == 2)
    assert read_tag(folder).healthy == (trials == 2)
    sentence = load(folder).verdict.sentence
    assert not sentence.startswith("Healthy")
    assert ("weights that others replaced were not healthy" in sentence) == (trials == 2)


def test_a_killed_process_leaves_word_of_weights_that_others_have_replaced(tmp_path: Path) -> None:
    """Its account is never written; the tag has the reasons, for the verdict and for `gradwatch top`."""
    killed = """
import os, signal
from gradwatch.session.session import live_sessions
live_sessions()[-1].flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    script = NET + RUINED.format(trials=3) + killed
    run(tmp_path, script, options=("--rules", "observe-only"))
    folder = tmp_path / "runs" / "r"
    assert "weights that others replaced were not healthy" in load(folder).verdict.sentence
    with JournalSource(folder) as source:
        (note,) = source.view(5.0).notes
    assert note.startswith(
        "weights that others have replaced were not healthy when they were last seen: weights"
    )


def test_a_resumed_optimizer_without_saved_baselines_is_told(tmp_path: Path) -> None:
    """In a folder of another run nothing is saved of it, and rules learn anew: one line says so, and why."""
    assert "learn anew" not in run(tmp_path, RESUMED).stderr
    (tmp_path / "runs").rename(tmp_path / "before")
    assert run(tmp_path, RESUMED).stderr.count("rules learn anew: the optimizer has taken 6 steps") == 1


@pytest.mark.parametrize("junk", ["a folder", "nested deeply"])
def test_a_state_that_cannot_be_read_or_written_is_no_internal_error(tmp_path: Path, junk: str) -> None:
    """What lies where the state is saved costs a line, and the training is watched."""
    place = tmp_path / "runs" / "r" / "state-rank0.json"
    place.parent.mkdir(parents=True)
    if junk == "a folder":
        place.mkdir()
    else:
        place.write_text("[" * 100_000, encoding="utf-8")
    done = run(tmp_path, RESUMED)
    ended(done)
    assert "the state saved by the previous run cannot be read" in done.stderr
    assert "6 of 6 steps watched" in done.stderr
    assert "internal error" not in done.stderr
    assert ("baselines are not saved" in done.stderr) == (junk == "a folder")


CHILDREN = (
    NET
    + """
import subprocess
def train(n):
    m = nn.Linear(4, 1)
    o = torch.optim.Adam(m.parameters(), 0.01)
    if os.path.exists("saved.pt"):
        o.load_state_dict(torch.load("saved.pt"))
    for t in range(n):
        o.zero_grad(); m(torch.randn(8, 4)).pow(2).mean().backward(); o.step()
    if not os.path.exists("saved.pt"):
        torch.save(o.state_dict(), "saved.pt")
if sys.argv[1:]:
    train(3)
else:
    train(6)
    pid = os.fork()
    if pid == 0:
        train(4)
        sys.exit()
    os.waitpid(pid, 0)
    subprocess.run([sys.executable, "x.py", "command"], check=True)
"""
)


def test_what_a_rank_starts_neither_takes_up_nor_replaces_its_baselines(tmp_path: Path) -> None:
    """A forked child and a command go on with the same optimizer at the same time: theirs are not the rank's."""
    said = [run(tmp_path, CHILDREN).stderr for _ in range(2)]
    attempts = steps(tmp_path)
    assert attempts == [list(range(n)) for n in (6, 4, 3)] + [
        list(range(6, 12)),
        *map(list, map(range, (4, 3))),
    ]
    state = json.loads((tmp_path / "runs" / "r" / "state-rank0.json").read_text(encoding="utf-8"))
    assert state["lanes"]["0"]["counted"] == 12
    for each in said:
        assert each.count(f"neither loads nor saves baselines: {FORKED}") == 1
        assert each.count(f"neither loads nor saves baselines: {TAKEN}") == 1


TRIALS = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "y.py", *sys.argv[1:]]))
"""


def test_a_command_takes_up_what_the_same_command_saved(tmp_path: Path) -> None:
    """A launcher's training goes on when it is started again; another trial of a sweep does not go on with it."""
    (tmp_path / "y.py").write_text(RESUMED)
    said = [run(tmp_path, TRIALS, trial).stderr for trial in ("a", "a", "b")]
    assert steps(tmp_path) == [list(range(6)), list(range(6, 12)), list(range(6))]
    assert ["baselines" in each for each in said] == [False, False, True]
    assert "not used: another command of this run saved them" in said[2]


def test_a_lock_that_the_script_has_closed_leaves_alone_what_has_its_number(tmp_path: Path) -> None:
    """A daemon closes every descriptor, and opens files of its own: to release the lock closes none of them."""
    lock = StateLock(RunInfo("r", str(tmp_path)))
    assert lock.keeps()
    number = lock._descriptor
    assert number is not None
    with (tmp_path / "own").open("w") as own:
        os.dup2(own.fileno(), number)
        lock.release()
        assert os.fstat(number).st_ino == os.fstat(own.fileno()).st_ino
    os.close(number)


def test_a_worker_that_goes_on_says_that_it_keeps_no_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process has the lock: nothing is saved, which is said of a resumed optimizer, not of a new one."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    said = []
    for _ in range(2):
        with gradwatch.watch(model, optimizer, run_dir=tmp_path, sinks=[]) as gw:
            folder = Path(gw.run.directory)
            folder.mkdir(parents=True)
            other = StateLock(gw.run)
            assert other.keeps()
            baselines = Baselines(session_of(gw))
            model(torch.ones(1, 2)).sum().backward()
            baselines.before_step(optimizer)
            optimizer.step()
            baselines.before_step(optimizer)
            baselines.save()
            other.release()
            assert [path.name for path in folder.iterdir()] == ["state-rank0.lock"]
        said.append(capsys.readouterr().err.count(f"saves baselines: {TAKEN}"))
    assert said == [0, 1]
