"""One launch, one line: what several processes did is summed by the one that started them, or said by themselves."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from gradwatch.account import Account, Taken, Watched, lines
from gradwatch.cli import main
from gradwatch.journal import EndEntry, EventsEntry, JournalReader, StepsEntry
from gradwatch.journal.columnar_steps import step_row
from gradwatch.journal.entries import RunEntry
from gradwatch.journal.files import JournalFiles
from gradwatch.journal.process_account import Recorded
from gradwatch.journal.retention import Retention
from gradwatch.launch import account_with_children, strict_rules
from gradwatch.records.run_info import RunInfo
from gradwatch.session.settings import ROOT, TELLER, told_by
from tests.launch.test_training import run
from tests.support.launch_cases import TRAIN
from tests.support.sink_records import make_event, make_record, make_sites, skip

WORKERS = """
import os, signal, subprocess, sys, time
import multiprocessing as mp

parent = os.getpid()

def train(steps, then=""):
    import torch
    torch.set_num_threads(1)
    m = torch.nn.Linear(4, 1)
    o = torch.optim.SGD(m.parameters(), 0.1)
    for t in range(steps):
        o.zero_grad()
        m(torch.ones(2, 4)).square().mean().backward()
        o.step()
    while then == "outlives" and os.getppid() == parent:
        time.sleep(0.05)
    if then in ("killed", "alive"):
        while not [name for name in os.listdir("runs/r") if name.endswith(".gwj")]:
            time.sleep(0.05)
        time.sleep(0.5 if then == "killed" else 60)
        os.kill(os.getpid(), signal.SIGKILL)
"""
FORKED = """
train(3)
for steps, then in ((4, ""), (5, ""), (6, "killed")):
    mp.get_context("fork").Process(target=train, args=(steps, then)).start()
sys.exit(4)
"""
LEFT = """
fork = mp.get_context("fork")
workers = [fork.Process(target=train, args=(4,)), fork.Process(target=train, args=(5, "outlives"))]
for worker in workers:
    worker.start()
workers[0].join()
while len([name for name in os.listdir("runs/r") if name.endswith(".gwj")]) < 2:
    time.sleep(0.05)
os._exit(5)
"""
STARTED = """
if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", "from x import train; train(2)"], check=True)
    spawn = mp.get_context("spawn")
    worker = spawn.Process(target=train, args=(3,))
    worker.start()
    worker.join()
    spawn.Process(target=train, args=(4, "alive"), daemon=True).start()
    while len([name for name in os.listdir("runs/r") if name.endswith(".gwj")]) < 3:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def told(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("gradwatch: ")]


def test_forked_workers_are_in_the_account_of_their_parent(tmp_path: Path) -> None:
    """One line though nobody joins them: 3 + 4 + 5 steps in three processes; the one that was killed is said."""
    done = run(tmp_path, WORKERS + FORKED)
    assert done.returncode == 4, done.stderr
    line, missed = told(done.stderr)
    assert line.startswith("gradwatch: 12 of 12 steps watched in 3 processes · 3 optimizers, 6 parameters")
    assert line.endswith("next: gradwatch report runs/r")
    lost, _, recorded = missed.partition(", at least ")
    assert lost == "gradwatch: not seen: 1 process left no summary (killed, or ended by os._exit)"
    assert recorded in {f"{n} step{'s' * (n > 1)} recorded" for n in range(1, 7)}


def test_those_who_outlive_a_process_that_leaves_without_a_word_print_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent leaves by os._exit: what a worker before had left to it is in the sum that `audit` makes."""
    done = run(tmp_path, WORKERS + LEFT)
    assert done.returncode == 5, done.stderr
    (line,) = told(done.stderr)
    assert line.startswith("gradwatch: 5 of 5 steps watched · 1 optimizer, 2 parameters")
    assert main(["audit", "--json", str(tmp_path / "runs" / "r")]) == 0
    (account,) = json.loads(capsys.readouterr().out)["accounts"]
    assert (account["processes"], account["watched"]["steps"], account["taken"]["steps"]) == (2, 9, 9)
    assert (account["lost"], account["running"]) == (0, 0)


@pytest.mark.soak
def test_a_process_that_trains_nothing_speaks_for_its_children(tmp_path: Path) -> None:
    """It never imports torch; a subprocess and a spawned worker train; a daemon holds nothing up; Ctrl-C ends it."""
    done = run(tmp_path, WORKERS + STARTED)
    assert done.returncode == -signal.SIGINT, done.stderr
    line, missed = told(done.stderr)
    assert line.startswith("gradwatch: 5 of 5 steps watched in 2 processes · 2 optimizers")
    assert " · stopped · " in line
    assert "1 process left no summary" in missed
    again = tmp_path / "again"
    again.mkdir()
    assert told(run(again, WORKERS + STARTED, options=("--quiet",)).stderr) == []


RANKS = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    o = torch.optim.SGD(m.parameters(), 0.1)
    m(torch.ones(2, 4)).square().mean().backward()
    o.step()

if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""
LOCAL = "version: 1\nrules: {mine: {detect: {kind: above, of: norm_local, threshold: 5}, do: [skip_step]}}\n"


@pytest.mark.soak
def test_ranks_that_refuse_the_rules_say_so_once(tmp_path: Path) -> None:
    """Of two ranks that know theirs from the process group alone the first tells why, and gives the account."""
    rules = tmp_path / "x.gradwatch.yaml"
    rules.write_text(LOCAL)
    done = run(tmp_path, RANKS, options=("--strict-rules", "--rules", str(rules)))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("rule 'mine': acts on norm_local") == 1
    assert done.stderr.count("0 of 0 steps watched") == 1
    assert (
        "step of a torch optimizer seen: the rules do not fit, and --strict-rules refuses them" in done.stderr
    )


def test_a_rank_says_of_a_refusal_what_rank_0_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing where it is the same; its own reason, or any where rank 0 has none, under its number."""
    monkeypatch.setattr(strict_rules, "WAIT_SECONDS", 0.1)
    store = dist.HashStore()
    assert strict_rules.words_of_rank("no", 1, store) == "rank 1: no"
    assert strict_rules.words_of_rank("no", 0, store) == "no"
    assert strict_rules.words_of_rank("no", 1, store) == ""
    assert strict_rules.words_of_rank("never", 1, store) == "rank 1: never"


# -- who tells, and what is found ------------------------------------------------------------------------

HERE = f"{os.uname().nodename}:1.5"


@pytest.mark.parametrize(
    ("env", "teller"),
    [
        ({}, 0),
        ({TELLER: f"7::{HERE}"}, 7),
        ({TELLER: f"{os.getpid()}::{HERE}"}, 0),
        ({TELLER: "7::elsewhere:1.5"}, 0),
        ({TELLER: f"7::{HERE}", "RANK": "0", "WORLD_SIZE": "2"}, 0),
        ({TELLER: f"7::{HERE}", "RANK": "0", "WORLD_SIZE": "1"}, 7),
        ({TELLER: f"7:0:{HERE}", "RANK": "0", "WORLD_SIZE": "2"}, 7),
        ({TELLER: "nonsense"}, 0),
    ],
    ids=["alone", "child", "itself", "other host", "a rank", "one rank", "child of a rank", "nonsense"],
)
def test_who_prints_the_account(env: dict[str, str], teller: int) -> None:
    """The process in the environment, unless that is this one, on another machine, or this is a rank of several."""
    assert told_by(env) == teller


def written(
    folder: Path, pid: int, account: Account | None, started: float, teller: int, launch: str = ""
) -> None:
    """A journal of four steps as such a process leaves it; None = without an end.

    One of the steps was rejected by a GradScaler, and skipped at one a rule has fired.
    """
    host = os.uname().nodename
    info = RunInfo("r", str(folder), pid=pid, host=host, start_time=started, told_by=teller, launch=launch)
    files = JournalFiles(folder, 0, 0, Retention(0), lambda attempt, segment: [RunEntry(info).encode()])
    sites = make_sites(1)
    records = [make_record(sites, [1.0], step=step, scalars={"scaler_skip": step == 1}) for step in range(4)]
    records[3] = make_record(sites, [1.0], step=3, decision=skip())
    events = EventsEntry(0, 0, 3, 0.0, (make_event("firing", step=3),))
    files.ensure_open()
    files.append([StepsEntry(0, 0, [step_row(record, {}) for record in records]).encode(), events.encode()])
    if account is not None:
        files.append([EndEntry(3, "finished", account.to_dict()).encode()])
    files.close()


@pytest.mark.parametrize("killed", [False, True])
def test_a_first_rank_is_told_once_also_where_it_is_killed_before_its_line(
    killed: bool, tmp_path: Path
) -> None:
    """torchrun ends the ranks beside one that failed, at any moment: between journal and line, too."""
    last = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
    (tmp_path / "rank.py").write_text(last * killed + TRAIN)
    script = """
import os, subprocess, sys
done = subprocess.run([sys.executable, "rank.py"], env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"})
print(done.returncode)
"""
    done = run(tmp_path, script)
    assert done.stdout.splitlines()[-1] == ("-9" if killed else "0")
    assert done.stderr.count("gradwatch: 3 of 3 steps watched") == 1
    assert done.stderr.count("\n") == 1


def test_children_are_summed_from_their_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this launch that leave the telling to this process; not earlier ones, nor those of another."""
    now, me = time.time(), os.getpid()
    monkeypatch.setenv(TELLER, f"{me}::{os.uname().nodename}:{now}")
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setenv("GRADWATCH_RUN_ID", "r")
    own = Account(Taken(backwards=1, optimizers=2), ended="failed")
    assert account_with_children.with_children(own) is own
    one = Account(
        Taken(backwards=4, steps=4, stepped=1), Watched(steps=3, optimizers=1), fired={"a": 1}, rules=5
    )
    folder = tmp_path / "r"
    written(folder, 2**22 + 1, one, now + 1, me)
    written(folder, 2**22 + 2, one, now + 1, me)
    written(folder, 2**22 + 3, None, now + 1, me)
    written(folder, os.getppid(), None, now + 1, me)
    written(folder, 2**22 + 4, one, now - 100, me)
    written(folder, 2**22 + 5, one, now + 1, me + 1)
    found = account_with_children.with_children(own)
    assert (found.taken.steps, found.taken.backwards, found.watched.steps) == (8, 9, 6)
    assert (found.processes, found.lost, found.running, found.recorded) == (3, 1, 1, 6)
    fired = {"a": 2, "non-finite": 2}
    assert (found.fired, found.actions, found.rules, found.ended) == (fired, {"skip_step": 2}, 5, "failed")
    assert found.directory == str(folder)
    assert not account_with_children.handed_over()
    written(folder, me, one, now + 1, 7)
    assert account_with_children.handed_over()
    assert replace(own, told_by=7).trained_or_watched


def test_processes_without_an_end_are_told_by_what_they_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never "0 of 0 steps watched" nor "no rule fired": the line and `audit` say how much is known, and of whom."""
    now, me = time.time(), os.getpid()
    monkeypatch.setenv(TELLER, f"{me}::{os.uname().nodename}:{now}")
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setenv("GRADWATCH_RUN_ID", "r")
    folder = tmp_path / "r"
    for gone in (2**22 + 1, 2**22 + 2):
        written(folder, gone, None, now + 1, me, "this one")
    silent = "at least 6 steps recorded in 2 processes that left no summary (killed, or ended by os._exit)"
    fired = " · fired: non-finite ×2 · done: skip_step ×2"
    assert lines(account_with_children.with_children(Account())) == [f"gradwatch: {silent}{fired}"]
    assert main(["audit", str(folder)]) == 0
    assert f"  {silent}{fired}\n" in capsys.readouterr().out
    account = Account(Taken(steps=3), Watched(steps=3), told_by=me)
    written(folder, 2**22 + 3, account, now + 1, me, "this one")
    written(folder, 2**22 + 4, account, now - 9, me, "an earlier one")
    line, missed = lines(account_with_children.with_children(Account()))
    assert line.startswith("gradwatch: 3 of 3 steps watched · ")
    assert fired in line
    missed = missed.removeprefix("gradwatch: ")
    assert missed == (
        "not seen: 2 processes left no summary (killed, or ended by os._exit), at least 6 steps recorded"
    )
    assert main(["audit", "--json", str(folder)]) == 0
    earlier, this = json.loads(capsys.readouterr().out)["accounts"]
    assert (earlier["lost"], earlier["watched"]["steps"]) == (0, 3)
    assert (this["lost"], this["recorded"], this["fired"]) == (2, 6, {"non-finite": 2})


def test_a_first_rank_that_is_gone_is_told_by_the_process_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have printed its own account; one that has left a note has done so, and one that runs will."""
    now = time.time()
    monkeypatch.setenv(TELLER, f"{os.getpid()}::{os.uname().nodename}:{now}")
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setenv("GRADWATCH_RUN_ID", "r")
    own = Account()
    written(tmp_path / "r", os.getppid(), None, now + 1, 0)
    written(tmp_path / "r", 2**22 + 1, Account(Taken(steps=3), Watched(steps=3)), now + 1, 0)
    assert account_with_children.with_children(own).watched.steps == 3
    (tmp_path / "r" / f"printed-{os.uname().nodename}-{2**22 + 1}").touch()
    assert account_with_children.with_children(own) is own
    written(tmp_path / "r", 2**22 + 2, None, now + 1, 0)
    found = account_with_children.with_children(own)
    assert (found.lost, found.running, found.recorded, found.processes) == (1, 0, 3, 0)


def test_what_could_not_write_its_end_and_so_printed_its_own_account_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of this process as well as a rank, until it turns out that it goes on."""
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setenv("GRADWATCH_RUN_ID", "r")
    now, child = time.time(), 2**22 + 1
    monkeypatch.setenv(TELLER, f"{os.getppid()}::{os.uname().nodename}:{now}")
    written(tmp_path / "r", child, None, now + 1, os.getpid())
    written(tmp_path / "r", child + 1, None, now + 1, 0)
    with monkeypatch.context() as in_child:
        for pid in (child, child + 1):
            in_child.setattr(os, "getpid", lambda pid=pid: pid)
            account_with_children.note_printed()
    monkeypatch.setenv(TELLER, f"{os.getpid()}::{os.uname().nodename}:{now}")
    assert account_with_children.with_children(Account()) == Account()
    with monkeypatch.context() as in_child:
        in_child.setattr(os, "getpid", lambda: child)
        account_with_children.unnote_printed()
    assert account_with_children.with_children(Account()).lost == 1


def test_the_end_of_a_journal_is_read_from_its_tail(tmp_path: Path) -> None:
    """Without what is before it, junk behind it or not; None where the process has written none."""
    account = Account(Taken(steps=2))
    written(tmp_path, 1, account, 0.0, 0)
    written(tmp_path, 2, None, 0.0, 0)
    first, second = (JournalReader(tmp_path / f"rank0-attempt{n}.gwj") for n in range(2))
    end = first.end()
    assert end is not None
    assert Account.from_dict(end.account) == account
    assert second.end() is None
    with (tmp_path / "rank0-attempt0.gwj").open("ab") as file:
        file.write(b"\x8fGW1 junk")
    assert first.end() == end


def test_an_account_that_cannot_be_read_is_none() -> None:
    """What a journal in a shared folder says at its end is not trusted: the steps recorded count, and no exception."""
    found = Recorded()
    found.take(RunEntry(RunInfo("r", "runs/r", pid=7)))
    found.take(EndEntry(0, "finished", {"fired": {"a": "many"}}))
    part = found.part()
    assert part is not None
    assert (part.pid, part.ended, part.account.counted) == (7, False, False)
