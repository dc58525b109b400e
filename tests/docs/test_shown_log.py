"""The log that README.md and using.md show, and the message in monitoring.md, are what that training gives today."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from gradwatch.cli import main
from tests.docs.test_pages import ROOT, fences
from tests.sinks.notify.receiver import receiving
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

TRAIN = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(1, 1)

    def forward(self, x):
        h = self.body(x) * (x != 0).any(1, keepdim=True)
        return self.head(h.pow(2).sum(1, keepdim=True).sqrt())


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(120):
    x = torch.randn(32, 8)
    if step == 30:
        x[3] = 0.0  # a padded sample: the derivative of its square root is infinite
    optimizer.zero_grad()
    (model(x) - x.norm(dim=1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""


class Printed(NamedTuple):
    """Lines of standard error, and the message that left, with the script and the run's folder by their names alone.

    `runs` is the folder of the run.
    """

    lines: list[str]
    message: str
    runs: Path


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """The training under `gradwatch run`, with a webhook."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    with receiving() as got:
        rules = f"version: 1\nextends: [default]\nsinks: [journal, log, webhook: {{url: '{got.url}'}}]\n"
        (folder / "rules.yaml").write_text(rules, encoding="utf-8")
        command = [*GRADWATCH, "run", "--rules", "rules.yaml", "--", sys.executable, "train.py"]
        done = warm.run(command, cwd=folder)
        assert done.returncode == 0, done.stderr
        (body,) = got.bodies
    message = f"{body['subject']}\n{body['text']}".replace(f"{folder}/", "")
    lines = re.sub(r"\S*/train\.py", "train.py", done.stderr).splitlines()
    return Printed(lines, message, folder / "gradwatch-runs")


@pytest.mark.parametrize("path", ["README.md", "gradwatch/docs/using.md", "gradwatch/docs/start.md"])
def test_the_account_is_as_printed(path: str, printed: Printed) -> None:
    """All of the line but its times and the name of the folder."""
    text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
    shown = re.findall(r"gradwatch: 120 of .*? gradwatch-runs/…", text)
    (line,) = [line for line in printed.lines if line.startswith("gradwatch: 120")]
    assert list(map(_without_times, shown)) == [
        _without_times(re.sub(r"gradwatch-runs/\S+", "gradwatch-runs/…", line))
    ]


def test_the_events_are_as_printed(printed: Printed) -> None:
    """Every field that README.md shows, up to where it is cut."""
    blocks = fences((ROOT / "README.md").read_text(encoding="utf-8"), "")
    (block,) = [one for one in blocks if "[critical ]" in one]
    fields = re.findall(r"(\w+)=('[^']*'|[^ '…]+)", block)
    assert {name for name, _ in fields} >= {"rule", "param", "actions", "weights", "cause", "why", "fix"}
    for name, value in fields:
        shown = value.strip("'").split("; …")[0]
        assert any(shown in line for line in printed.lines if f"{name}=" in line), (name, value)


def test_the_message_is_as_sent(printed: Printed) -> None:
    """Word for word, but for the run and the machine."""
    blocks = fences((ROOT / "gradwatch/docs/monitoring.md").read_text(encoding="utf-8"), "")
    (block,) = [one for one in blocks if "gradwatch: non-finite" in one]

    def anonymous(text: str) -> str:
        return re.sub(r"\d{8}-\d{6}-\w{4}( on [^)]+)?", "RUN", text).strip()

    assert anonymous(printed.message) == anonymous(block)


def test_the_backtest_is_as_printed(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that backtest.md shows, of its rule file on this run."""
    text = (ROOT / "gradwatch/docs/backtest.md").read_text(encoding="utf-8")
    (rules,) = fences(text, "yaml")
    (shown,) = [one for one in fences(text, "") if "steps judged by" in one]
    (tmp_path / "strict.gradwatch.yaml").write_text(rules, encoding="utf-8")
    monkeypatch.chdir(printed.runs.parent)
    assert main(["backtest", "--rules", str(tmp_path / "strict.gradwatch.yaml")]) == 1
    assert re.sub(r"\d{8}-\d{6}-\w{4}", "RUN", capsys.readouterr().out) == shown


def test_the_live_view_is_as_printed(
    printed: Printed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that report.md shows, but for the speed and the cost."""
    text = (ROOT / "gradwatch/docs/report.md").read_text(encoding="utf-8")
    (shown,) = [one for one in fences(text, "") if one.startswith("gradwatch top")]

    def timeless(text: str) -> str:
        return re.sub(r"\d{8}-\d{6}-\w{4}|\S+ steps/s|own cost \S+", "RUN", text)

    monkeypatch.chdir(printed.runs.parent)
    assert main(["top"]) == 0
    assert timeless(capsys.readouterr().out) == timeless(shown)


def test_the_first_five_minutes_are_as_printed(
    printed: Printed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """start.md has that very script, the report's sentence, and lines of the cause."""
    text = (ROOT / "gradwatch/docs/start.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    shown = [block for language, block in blocks if not language]
    assert [block for language, block in blocks if language == "python"] == [TRAIN]
    monkeypatch.chdir(printed.runs.parent)
    assert main(["report"]) == 0
    (sentence,) = [one for one in shown if one.startswith("Went wrong")]
    assert capsys.readouterr().out.splitlines()[0].replace(f"{printed.runs.parent}/", "") == sentence.strip()
    assert main(["explain"]) == 0
    explained = capsys.readouterr().out.replace(f"{printed.runs.parent}/", "")
    (cause,) = [one for one in shown if "train.py:12 in forward" in one]
    assert all(part in explained for part in cause.rstrip().split("\n\n"))


def _without_times(line: str) -> str:
    """Where imports were made before, as here, attaching takes no time that is worth telling."""
    return re.sub(r"(?<=own cost )[\d.]+%( · attached in [\d.]+ s)?", "_", line)
