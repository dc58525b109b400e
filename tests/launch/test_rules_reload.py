"""`gradwatch run --reload`: a rule file that changes while a script trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.journal import EventsEntry, JournalReader, StepsEntry
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

TRAIN = """
import json, os, pathlib, time, urllib.request
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), 1e-6)  # norms stay as they are, however many steps it takes
rules = pathlib.Path("rules.yaml")

def step(loss_times=1.0):
    optimizer.zero_grad()
    (model(torch.randn(8, 4)).square().mean() * loss_times).backward()
    optimizer.step()

def metrics():
    (file,) = pathlib.Path("gradwatch-runs").glob("*/endpoint-rank0.json")
    with urllib.request.urlopen(json.loads(file.read_text())["url"]) as answer:
        return answer.read().decode()

def until(found):
    for _ in range(6000):
        step()
        try:
            if found(metrics()):
                return
        except (OSError, ValueError):
            pass  # between two watches
        time.sleep(0.01)
    raise SystemExit("it did not come")

def replaced(text):
    pathlib.Path("next").write_text(text)
    os.replace("next", rules)
"""
RULES = "version: 1\nrules:\n  NAME: {detect: {kind: above, of: total_norm, threshold: 1e-12}}\n"
# At the start of a line: the help of the metric begins with its name and a 1.
SUCCEEDED = r'lambda text: "\ngradwatch_config_last_reload_successful 1" in text'
FAILED = r'lambda text: "\ngradwatch_config_last_reload_successful 0" in text'


def has(rule: str) -> str:
    return f"""lambda text: 'rule="{rule}"' in text"""


def run(folder: Path, script: str, *options: str, more: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "rules.yaml").write_text(RULES.replace("NAME", "first") + more)
    (folder / "train.py").write_text(TRAIN + f"RULES = {RULES!r}\nMORE = {more!r}\n" + script)
    command = [*GRADWATCH, "run", *options, "--rules", "rules.yaml", "--listen", "127.0.0.1:0"]
    return warm.run([*command, "--", sys.executable, "train.py"], folder, timeout=280)


def fired(folder: Path) -> list[set[str]]:
    """The rules that fired, by process or watch, in their order."""
    found = []
    for path in sorted((folder / "gradwatch-runs").glob("*/*.gwj")):
        entries = JournalReader(path).entries()
        found.append({event.rule for one in entries if isinstance(one, EventsEntry) for event in one.events})
    return found


def recorded_steps(folder: Path) -> list[int]:
    """The numbers of all steps recorded, in the order of the journals."""
    return [
        row.step
        for path in sorted((folder / "gradwatch-runs").glob("*/*.gwj"))
        for one in JournalReader(path).entries()
        if isinstance(one, StepsEntry)
        for row in one.rows
    ]


def test_a_changed_file_is_taken_up_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    """New rules judge on; what is wrong leaves them in force, with its place and the metric, until it is mended."""
    script = f"""
until({has("first")})
replaced(RULES.replace("NAME", "second"))
until({has("second")})
replaced("version: 1\\nrules: {{bad: {{detect: {{kind: nan}}}}}}\\n")
until({FAILED})
assert 'rule="second"' in metrics()
replaced(RULES.replace("NAME", "third"))
until({has("third")})
until({SUCCEEDED})
for _ in range(5):
    step()
"""
    done = run(tmp_path, script, "--reload")
    assert done.returncode == 0, done.stderr
    assert fired(tmp_path) == [{"first"}, {"second"}, {"third"}]
    assert len(re.findall("has changed, and is in force: 1 rules", done.stderr)) == 2
    assert "rules.yaml has changed and is not taken up, the old rules stay" in done.stderr
    assert "rules.yaml:2:" in done.stderr
    (taken,) = re.findall(r"gradwatch: ([\d,]+) of ([\d,]+) steps watched", done.stderr)
    assert taken[0] == taken[1]
    assert "fired: first ×1, second ×1, third ×1" in done.stderr
    assert "1 optimizer, 2 parameters," in done.stderr  # by three watches one after the other


@pytest.mark.parametrize(
    "optimizer",
    [
        "SGD(model.parameters(), 1e-6, momentum=0.9)",
        pytest.param("Adam(model.parameters(), 1e-6)", marks=pytest.mark.soak),
    ],
)
def test_baselines_go_on(optimizer: str, tmp_path: Path) -> None:
    """A rule whose warm-up was over judges from the first step on after a change of another rule."""
    script = f"""
optimizer = torch.optim.{optimizer}
for _ in range(60):
    step()
replaced(RULES.replace("NAME", "second") + MORE)
until({has("second")})
step(1e6)
for _ in range(3):
    step()
"""
    spike = "  spike: {detect: {kind: spike, of: total_norm, above: 5}, warmup: 60}\n"
    done = run(tmp_path, script, "--reload", more=spike)
    assert done.returncode == 0, done.stderr
    assert "spike" in fired(tmp_path)[-1]
    steps = recorded_steps(tmp_path)
    assert steps == list(range(len(steps)))


def test_rules_that_do_not_fit_the_model_leave_the_session_as_it_is(tmp_path: Path) -> None:
    """With --strict-rules: one journal, one watch, and the old rules judge on; what is mended is taken up."""
    script = f"""
until({has("first")})
replaced(UNFIT)
until({FAILED})
for _ in range(5):
    step()
"""
    unfit = RULES.replace("NAME", "second").replace("rules:", "groups: {none: {params: [nothing.*]}}\nrules:")
    unfit += "  third: {detect: {kind: above, of: norm, threshold: 1}, groups: [none]}\n"
    done = run(tmp_path, f"UNFIT = {unfit!r}\n" + script, "--reload", "--strict-rules")
    assert done.returncode == 0, done.stderr
    assert "is not taken up, the old rules stay: the rules do not fit this model" in done.stderr
    assert fired(tmp_path) == [{"first"}]
    assert "1 optimizer, 2 parameters," in done.stderr


@pytest.mark.soak
def test_a_file_that_only_refused_rules_extend_is_looked_at(tmp_path: Path) -> None:
    """The new rules extend a file that is not there yet: as it comes, they are taken up."""
    script = f"""
until({has("first")})
replaced("version: 1\\nextends: [more.yaml]\\n")
until({FAILED})
pathlib.Path("more.yaml").write_text(RULES.replace("NAME", "second"))
until({has("second")})
"""
    done = run(tmp_path, script, "--reload")
    assert done.returncode == 0, done.stderr
    assert fired(tmp_path)[-1] == {"second"}


def test_loops_without_an_optimizer_take_up_rules_between_two_windows(tmp_path: Path) -> None:
    """Their windows are counted on, and two backwards of one window are not torn apart."""
    script = f"""
del optimizer

def step():
    for _ in range(2):
        (model(torch.randn(8, 4)).square().mean()).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 1e-6 * param.grad
            param.grad = None

until({has("first")})
replaced(RULES.replace("NAME", "second"))
until({has("second")})
"""
    done = run(tmp_path, script, "--reload")
    assert done.returncode == 0, done.stderr
    assert fired(tmp_path) == [{"first"}, {"second"}]
    steps = recorded_steps(tmp_path)
    assert steps == list(range(len(steps)))
    assert f"{2 * len(steps)} backwards and no step" in done.stderr


@pytest.mark.soak
def test_steps_watched_without_a_journal_are_said_to_be_in_none(tmp_path: Path) -> None:
    """Rules without the journal among their sinks, and back: the audit does not take them for unwatched."""
    script = f"""
until({has("first")})
replaced("sinks: [prometheus]\\n" + RULES.replace("NAME", "second"))
until({has("second")})
for _ in range(20):
    step()
replaced(RULES.replace("NAME", "third"))
until({has("third")})
"""
    done = run(tmp_path, script, "--reload")
    assert done.returncode == 0, done.stderr
    ((watched, taken),) = re.findall(r"gradwatch: ([\d,]+) of ([\d,]+) steps watched", done.stderr)
    assert watched == taken
    folder = next((tmp_path / "gradwatch-runs").glob("*/*.gwj")).parent
    audit = warm.run([*GRADWATCH, "audit", str(folder)]).stdout
    missing = int(taken.replace(",", "")) - len(recorded_steps(tmp_path))
    assert f"{missing:,} of {taken} optimizer steps are in no journal" in audit
    assert "before gradwatch was attached" not in audit


def test_a_pack_cannot_change_and_that_is_said(tmp_path: Path) -> None:
    """`--reload` without a rule file of one's own: one line, and the script runs."""
    command = [*GRADWATCH, "run", "--reload", "--", sys.executable, "-c", "pass"]
    done = warm.run(command, tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("--reload has no file to look at: 'default' is a shipped pack") == 1


@pytest.mark.soak
def test_without_the_option_nothing_is_looked_at(tmp_path: Path) -> None:
    """A file that is edited for the next job does not change the running one."""
    script = """
for _ in range(5):
    step()
replaced(RULES.replace("NAME", "second"))
began = time.monotonic()
while time.monotonic() - began < 3:
    step()
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert fired(tmp_path) == [{"first"}]
    assert "has changed" not in done.stderr


@pytest.mark.soak
def test_a_change_before_the_end_leaves_a_whole_journal(tmp_path: Path) -> None:
    """The script ends as the new rules are read, or just after: each watch is closed as ever, with its account."""
    script = f"""
until({has("first")})
replaced(RULES.replace("NAME", "second"))
for _ in range(2000):  # the thread that reads them may be over between two looks
    step()
    if "gradwatch-reload" in [thread.name for thread in __import__("threading").enumerate()]:
        break
"""
    done = run(tmp_path, script, "--reload")
    assert done.returncode == 0, done.stderr
    assert "steps watched" in done.stderr
    journals = list((tmp_path / "gradwatch-runs").glob("*/*.gwj"))
    assert journals
    assert all(JournalReader(path).end() is not None for path in journals)


RANKS = """
import json, os, pathlib, time, urllib.request
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
model = torch.nn.ModuleDict({"ab"[rank]: torch.nn.Linear(4, 2)})
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
steps = 0

def metrics():
    (file,) = pathlib.Path("gradwatch-runs").glob(f"*/endpoint-rank{rank}.json")
    with urllib.request.urlopen(json.loads(file.read_text())["url"]) as answer:
        return answer.read().decode()

def until(found, text=""):
    global steps
    if text and not rank:
        pathlib.Path("next").write_text(text)
        os.replace("next", "rules.yaml")
    for _ in range(6000):
        optimizer.zero_grad()
        model["ab"[rank]](torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        steps += 1
        try:
            seen = torch.tensor(float(found(metrics())))
        except (OSError, ValueError):
            seen = torch.zeros(())  # between two watches
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        if seen:
            return
        time.sleep(0.01)
    raise SystemExit("it did not come")
"""


def on_two_ranks(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run train.py by torchrun, watched by rules.yaml; it has to end well."""
    command = [
        *GRADWATCH,
        "run",
        "--reload",
        *options,
        "--rules",
        "rules.yaml",
        "--listen",
        "127.0.0.1:0",
        "--",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *torchrun, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_ranks_take_up_rules_after_the_same_step_or_not_at_all(tmp_path: Path) -> None:
    """What is wrong, or fits the model of one of them alone, is refused on both; what is right begins at one step."""
    unfit = RULES.replace("NAME", "unfit").replace("rules:", "groups: {mine: {params: [a.*]}}\nrules:")
    unfit += "  more: {detect: {kind: above, of: norm, threshold: 1}, groups: [mine]}\n"
    (tmp_path / "rules.yaml").write_text(RULES.replace("NAME", "first"))
    (tmp_path / "train.py").write_text(
        f"""{RANKS}
until({has("first")})
until({FAILED}, "version: 1\\nrules: {{bad: {{detect: {{kind: nan}}}}}}\\n")
until({SUCCEEDED}, {RULES.replace("NAME", "first")!r})
until({FAILED}, {unfit!r})
until({has("second")}, {RULES.replace("NAME", "second")!r})
until({SUCCEEDED})
until(lambda text: True)
dist.destroy_process_group()
"""
    )
    done = on_two_ranks(tmp_path, "--strict-rules")
    begun: dict[int, list[tuple[int, set[str]]]] = {0: [], 1: []}
    for path in sorted((tmp_path / "gradwatch-runs").glob("*/rank*.gwj")):
        entries = list(JournalReader(path).entries())
        first = next(row.step for one in entries if isinstance(one, StepsEntry) for row in one.rows)
        rules = {event.rule for one in entries if isinstance(one, EventsEntry) for event in one.events}
        begun[JournalReader(path).rank].append((first, rules))
    assert begun[0] == begun[1]
    assert [rules for _, rules in begun[0]] == [{"first"}, {"second"}]
    assert done.stderr.count("has changed, and is in force: 1 rules") == 1
    assert "rules.yaml:2:" in done.stderr
    assert "the old rules stay: rank 1: the rules do not fit this model" in done.stderr


PROBED = """
import os, pathlib, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
probe = torch.nn.Linear(3, 1)
of_probe = torch.optim.SGD(probe.parameters(), 1e-3)
enough = torch.zeros(())
since = None
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if rank == 0:
        of_probe.zero_grad()
        probe(torch.randn(4, 3)).sum().backward()
        of_probe.step()
        if step == 50:
            pathlib.Path("next").write_text("version: 1\\nclip: {total: {method: norm, max_norm: 1.0e-3}}\\n")
            os.replace("next", "rules.yaml")
        journals = len(list(pathlib.Path("gradwatch-runs").glob("*/rank0*.gwj")))
        since = since or (step if journals > 1 else None)
        enough.fill_(since is not None and step > since + 30)
    dist.broadcast(enough, 0)
    if enough:
        break
    time.sleep(0.005)
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_an_optimizer_that_one_rank_has_alone_shifts_nothing(tmp_path: Path) -> None:
    """Steps are counted of the one that all ranks have, and by the rules taken up they clip the same steps together."""
    (tmp_path / "rules.yaml").write_text(RULES.replace("NAME", "first"))
    (tmp_path / "train.py").write_text(PROBED)
    on_two_ranks(tmp_path)
    clipped = {}
    for rank in (0, 1):
        (_, path) = sorted((tmp_path / "gradwatch-runs").glob(f"*/rank{rank}-attempt*.gwj"))
        entries = [
            one for one in JournalReader(path).entries() if isinstance(one, StepsEntry) and one.optimizer == 0
        ]
        clipped[rank] = [row.step for one in entries for row in one.rows if row.decision.orders]
    assert clipped[0] == clipped[1]
    assert len(clipped[0]) >= 20
