"""examples.md: five trainings recorded under `gradwatch run`, and what every command prints of them, word for word."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gradwatch.cli import main
from tests.docs.test_pages import ROOT, fences
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

PAGE = ROOT / "gradwatch" / "docs" / "examples.md"
SCRIPTS = Path(__file__).parent / "trainings"
TRAININGS = {"reinforce": -9, "mlp": 0, "cnn": 0, "language_model": 0, "gan": 0}
"""Each with the exit status of its script; the first is killed."""
HAPPENED = {
    "mlp": "Healthy: no rule fired in 300 recorded steps; ",
    "cnn": "Went wrong: rule loss-non-finite (critical) fired at step 120 (the forward of div in Net at cnn.py:15)",
    "language_model": "Went wrong: rule total-norm-spike-severe (critical) fired at step 151 (",
    "gan": "Look at this: rule vanishing-by-share (warning) fired at step 163 (gradients that vanish in ",
    "reinforce": "Broken off: no rule fired in _ recorded steps; the process was killed, ",
}
MADE_WITH = "2.13.0", "AVX512"
"""Torch and the CPU's instructions that the numbers of the page were made with: others round otherwise."""
VARIES = re.compile(
    r"\d{8}-\d{6}-\w{4}|\bRUN\b"
    r"|[\d.,e+]+(?= steps/s)|(?<=own cost):? [\d.]+%( · attached in [\d.]+ s)?"
    r"|(?<= · )attached in [\d.]+ s|(?<=the replay took )[\d.]+(?= s)|\d+(?= kB)"
    r"|(?<=its weights were )(not looked at|healthy after step \d+, when they were last looked at)"  # by the clock
)
EVERY_FORM = (
    "report",
    "report --format md",
    "report --format json",
    "top",
    "top --json",
    "explain",
    "explain --json",
    "explain --markdown",
    "audit",
    "audit --json",
    "backtest --rules strict.gradwatch.yaml",
    "backtest --rules strict.gradwatch.yaml --against default --json",
)
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each training, with its script, its run and a rule file."""
    root = tmp_path_factory.mktemp("examples")
    (rules,) = fences(PAGE.read_text(encoding="utf-8"), "yaml")

    def train(name: str) -> int:
        folder = root / name
        folder.mkdir()
        shutil.copy(SCRIPTS / f"{name}.py", folder)
        (folder / "strict.gradwatch.yaml").write_text(rules, encoding="utf-8")
        command = [*GRADWATCH, "run", "--listen", "127.0.0.1:0", "--", sys.executable, f"{name}.py"]
        return warm.run(command, folder).returncode

    with ThreadPoolExecutor(2) as pool:
        assert dict(zip(TRAININGS, pool.map(train, TRAININGS), strict=True)) == TRAININGS
    return root


def shown(name: str) -> list[tuple[str, str]]:
    """(command, what the page says that it prints) of the section on a training, in their order."""
    return printed_of(f"`{name}.py`")


def printed_of(head: str) -> list[tuple[str, str]]:
    """The same of the section whose heading begins so."""
    section = re.split(r"^## (?=`)", PAGE.read_text(encoding="utf-8"), flags=re.M)
    (text,) = (one for one in section if one.startswith(head))
    (block,) = fences(text, "console")
    found = re.findall(r"^\$ gradwatch (.+)\n((?:(?!\$ ).*\n)*)", block, re.M)
    assert len(found) == block.count("$ ")
    return found


def constant(text: str, folder: Path) -> str:
    """The text without what differs from run to run, and without the blank line before the next command."""
    return VARIES.sub("_", text.replace(f"{folder}/", "")).rstrip("\n")


def compared(name: str, words: str, text: str) -> str:
    """All of it where numbers come out to the last digit shown, else the line that answers, without its numbers.

    How many of its last steps a killed process has left depends on how long they took.
    """
    made_with = torch.__version__.partition("+")[0], torch.backends.cpu.get_cpu_capability()
    if made_with == MADE_WITH and not TRAININGS[name]:
        return text
    return (
        re.sub(r"\d[\d.,e+-]*", "_", text.partition("\n")[0])
        if words.startswith(("report", "explain"))
        else ""
    )


@pytest.mark.parametrize("name", TRAININGS)
def test_the_page_shows_what_is_printed(
    name: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Each command of its section, without the name of a run; what to write there stands in the message."""
    monkeypatch.chdir(recorded / name)
    assert {words.split()[0] for words, _ in shown(name)} == {"report", "top", "explain", "audit", "backtest"}
    for words, says in shown(name):
        capsys.readouterr()
        assert main(shlex.split(words)) in (0, 1)
        printed = capsys.readouterr().out
        of_page, of_run = (compared(name, words, constant(text, recorded / name)) for text in (says, printed))
        assert of_page == of_run, f"{words}\n{printed}"


@pytest.mark.parametrize("name", TRAININGS)
def test_what_happened_is_answered_by_one_command(
    name: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """`gradwatch report` without a name begins with the answer: healthy, NaN, exploding, vanishing, killed."""
    monkeypatch.chdir(recorded / name)
    assert main(["report"]) == 0
    printed = capsys.readouterr().out.replace(f"{recorded / name}/", "")
    if TRAININGS[name]:
        printed = re.sub(r"\d+(?= recorded steps)", "_", printed)
    assert printed.startswith(HAPPENED[name])


@pytest.mark.parametrize("name", TRAININGS)
def test_every_command_that_reads_runs_reads_each(
    name: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """In each of its forms: it ends as it is documented to, says something, and JSON is JSON."""
    monkeypatch.chdir(recorded / name)
    (run,) = Path("gradwatch-runs").glob("*-*")
    healthy = [f"tune {run} --healthy --budget 10"] if name == "mlp" else []
    for form in (*EVERY_FORM, *healthy):
        status = main(form.split())
        out, err = capsys.readouterr()
        assert status in (0, 1), f"{form}: {err}"
        assert out.strip(), form
        if "json" in form:
            assert isinstance(json.loads(out), dict), form
