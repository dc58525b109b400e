"""gradwatch/docs/extending.md, followed literally in a copy of the package: what it adds is used by a training."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest

import gradwatch
from tests.support import warm

PACKAGE = Path(gradwatch.__file__).parent
PAGE = (PACKAGE / "docs" / "extending.md").read_text()
TRAINING = """
import json, sys
import torch
import gradwatch
from gradwatch.testing import check_detector, check_policy
assert gradwatch.__file__.startswith(sys.argv[1]), gradwatch.__file__
{check}
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.0)
fired, grads = [], []
class Kept:
    name = "kept"
    def open(self, run, health): pass
    def write(self, record): fired.extend(one.rule for one in record.verdict.events if one.kind == "firing")
    def flush(self, timeout): return True
    def close(self): pass
sinks = [Kept()] if {own} else None
with gradwatch.watch(model, optimizer, rules="rules.yaml", sinks=sinks, strict=True):
    for step in range(8):
        optimizer.zero_grad()
        (model(torch.ones(4, 3)).sum() * (step + 1)).backward()
        optimizer.step()
        grads.append(max(float(param.grad.abs().max()) for param in model.parameters()))
print(json.dumps({{"fired": fired, "grads": grads}}))
"""
CHECKS = {
    "detector": "from gradwatch.detectors import Rising\ncheck_detector(Rising())",
    "clip policy": "from gradwatch.policies import SoftValue\ncheck_policy(SoftValue(0.5))",
    "sink": "",
    "action": "",
}


def section(noun: str) -> str:
    """The text under the heading of one kind."""
    match = re.search(rf"^## An? {noun}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert match is not None, noun
    return match[1]


def blocks(noun: str, language: str) -> list[tuple[str, str]]:
    """(the file last named before it, its text) of each fenced block."""
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", section(noun), re.M | re.S):
        named = re.findall(r"`gradwatch/([\w/]+\.py)`", section(noun)[: match.start()])
        found.append((named[-1] if named else "", match[1]))
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, in the folder that a training is run in."""
    shutil.copytree(PACKAGE, tmp_path / "gradwatch")  # with its bytecode, which need not be made again
    return tmp_path


@pytest.mark.parametrize("noun", CHECKS)
def test_what_the_page_adds_works(noun: str, copy: Path) -> None:
    """A block is a new file, or is added to the end of one that is there; a rule file uses what they add."""
    for number, (name, source) in enumerate(blocks(noun, "python")):
        path = copy / "gradwatch" / name
        assert path.exists() == (number > 0 or noun == "action")
        path.write_text(f"{path.read_text()}\n\n{source}" if path.exists() else source)
    ((_, rules),) = blocks(noun, "yaml")
    (copy / "rules.yaml").write_text(rules)
    script = TRAINING.format(check=CHECKS[noun], own=noun != "sink")
    surroundings = {"PYTHONPATH": str(copy), "PATH": "", "GRADWATCH_DIR": str(copy / "runs")}
    ran = warm.run([sys.executable, "-c", script, str(copy)], copy, surroundings, check=True)
    said = json.loads(ran.stdout.splitlines()[-1])
    if noun == "detector":
        assert said["fired"] == ["ever-larger"]
    elif noun == "action":
        assert said["fired"] == ["large"]
        bare = [4.0 * step for step in range(1, 9)]  # each element; the bias has two, and is damped last
        assert said["grads"] == pytest.approx([g * (0.25 if g * math.sqrt(2) > 15 else 1) for g in bare])
    elif noun == "clip policy":
        assert max(said["grads"]) == pytest.approx(0.01, rel=1e-3)
    else:
        lines = (copy / "norms.csv").read_text().splitlines()
        assert lines[0] == "step,total_norm"
        assert len(lines) == 9


def test_the_page_counts_files_as_they_are() -> None:
    """The table says how many files of the package each section touches."""
    for noun in CHECKS:
        row = next(line for line in PAGE.splitlines() if re.match(rf"\| an? {noun}", line))
        assert int(row.split("|")[3]) == len(blocks(noun, "python"))
