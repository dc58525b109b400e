"""`gradwatch run --reload`: a rule file that changes while a script trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gradwatch.journal import EventsEntry, JournalReader, StepsEntry
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
SUCCEEDED = 'lambda text: "gradwatch_config_last_reload_successful 1" in text'
FAILED = 'lambda text: "gradwatch_config_last_reload_successful 0" in text'


def has(rule: str) -> str:
    return f"""lambda text: 'rule="{rule}"' in text"""


def run(folder: Path, script: str, *options: str, more: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "rules.yaml").write_text(RULES.replace("NAME", "first") + more)
    (folder / "train.py").write_text(TRAIN + f"RULES = {RULES!r}\nMORE = {more!r}\n" + script)
    command = [*GRADWATCH, "run", *options, "--rules", "rules.yaml", "--listen", "127.0.0.1:0"]
    return subprocess.run(
        [*command, "--", sys.executable, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def fired(folder: Path) -> list[set[str]]:
    """The rules that fired, by process or watch, in their order."""
    found = []
    for path in sorted((folder / "gradwatch-runs").glob("*/*.gwj")):
        entries = JournalReader(path).entries()
        found.append({event.rule for one in entries if isinstance(one, EventsEntry) for event in one.events})
    return found


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


def test_baselines_go_on(tmp_path: Path) -> None:
    """A rule whose warm-up was over judges from the first step on after a change of another rule."""
    script = f"""
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
    steps = [
        row.step
        for path in sorted((tmp_path / "gradwatch-runs").glob("*/*.gwj"))
        for one in JournalReader(path).entries()
        if isinstance(one, StepsEntry)
        for row in one.rows
    ]
    assert steps == list(range(len(steps)))


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
