"""`gradwatch explain`: the page and the document of an incident, read from a journal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import gradwatch
from gradwatch.cli import main
from gradwatch.rules.files import parse_rules
from tests.localise.models import SqrtAtZero
from tests.localise.test_in_the_loop import broken, rules
from tests.promises.launched import execute
from tests.support.launch_cases import GRADWATCH

TWO = """version: 1
rules:
  nan: {{detect: {{kind: nonfinite}}, severity: critical, do: [skip_step, localise]}}
  {name}: {{detect: {{kind: above, of: total_norm, threshold: 1e4}}, for: 1}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, in which two steps broke, far apart."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model = SqrtAtZero()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules=rules(), run_dir=folder, listen="127.0.0.1:0"):
        for step in range(30):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            model(broken(x) if step in (2, 29) else x).sum().backward()
            optimizer.step()
    return folder


def test_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What, where, the evidence, the remedy, how it was found; the newest run of --dir is taken."""
    assert main(["explain", "non-finite-0-2", "--dir", str(runs)]) == 0
    told = capsys.readouterr().out
    for words in (
        "## non-finite-0-2: the backward of sqrt in SqrtAtZero",
        "return h + torch.sqrt(spread)  # fault",
        "saved result: float32[5, 1], 5 zero of 5, 0 … 0",
        "Put the epsilon inside",
        "step 2, rank 0",
        "first parameter in backward order: `enter.bias`",
    ):
        assert words in told
    assert "\x1b" not in told


def test_every_incident_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document per incident, in strict JSON, with the remedy."""
    assert main(["explain", "--dir", str(runs), "--json"]) == 0

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)["findings"]
    assert [one["incident"] for one in found] == ["non-finite-0-2", "non-finite-0-29"]
    assert {one["suggestion"]["id"] for one in found} == {"sqrt-at-zero"}
    assert found[0]["where"].endswith("models.py:" + found[0]["where"].rsplit(":", 1)[1])


def test_without_arguments_all_that_fired_in_the_last_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a cause and without one, by `explain` and by `audit`; not what fired in the run before it."""
    monkeypatch.chdir(tmp_path)
    for name in ("large", "huge"):
        torch.manual_seed(0)
        model = SqrtAtZero()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with gradwatch.watch(
            model, optimizer, rules=parse_rules(TWO.format(name=name)), listen="127.0.0.1:0"
        ):
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(5, 4)
                (model(broken(x) if step == 2 else x).sum() * (1e6 if step == 1 else 1.0)).backward()
                optimizer.step()
    capsys.readouterr()
    for command in ("explain", "audit"):
        assert main([command]) == 0
        told = capsys.readouterr().out
        rows = [line.split() for line in told.splitlines()]
        assert ["huge", "warning", "1", "1", "1", "–"] in rows
        (cause,) = [" ".join(row) for row in rows if row[:2] == ["nan", "critical"]]
        assert cause.startswith("nan critical 1 2 2 the backward of sqrt in SqrtAtZero")
        assert "large" not in [word for row in rows for word in row[:1]]


def test_an_incident_that_is_not_there(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ones that are there are named."""
    assert main(["explain", "other-0-1", "--dir", str(runs)]) == 2
    assert "there are: non-finite-0-2, non-finite-0-29" in capsys.readouterr().err


def test_what_cannot_be_read_of_a_journal_is_told(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `audit` and `explain`, in words and as JSON: what fired there is missing from them."""
    copy = tmp_path / "copy"
    shutil.copytree(next(one for one in runs.iterdir() if one.is_dir()), copy)
    (journal,) = copy.glob("*.gwj")
    assert main(["audit", str(copy)]) == 0
    assert "damaged" not in capsys.readouterr().out
    data = bytearray(journal.read_bytes())
    middle = len(data.rstrip(b"\0")) // 2
    for at in range(middle, middle + 200):  # inverted: zeros may stand there already
        data[at] ^= 0xFF
    journal.write_bytes(data)
    for command in (["audit", str(copy)], ["explain", "--run", str(copy)]):
        main(command)
        said = capsys.readouterr().out
        assert f"bytes of {journal.name} cannot be read" in said
        main([*command, "--json"])
        damage = json.loads(capsys.readouterr().out)["damage"]  # of one frame, or of two side by side
        assert sum(part["length"] for part in damage) >= 200


READERS = (
    ["audit"],
    ["explain", "--run"],
    ["explain", "non-finite-0-2", "--run"],
    ["report"],
    ["top", "--once"],
    ["backtest", "--rules", "default"],
)


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_of_a_journal_that_cannot_be_read_nothing_is_claimed(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    """Every command says so in the same words, where it is the only one and where another is whole."""
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    alone.mkdir()
    shutil.copytree(next(one for one in runs.iterdir() if one.is_dir()), beside)
    for journal in (alone / "rank0-attempt0.gwj", beside / "rank0-attempt7.gwj"):
        journal.write_bytes(os.urandom(size))
        os.utime(journal, (1e9, 1e9))  # `top` waits for one that has just begun
    for command in READERS:
        assert main([*command, str(alone)]) == 2, command
        assert capsys.readouterr().err == f"gradwatch: nothing in {alone} can be read as a journal\n"
    for command in (READERS[0], READERS[1], [*READERS[3], "--format", "md"], READERS[4]):
        assert main([*command, str(beside)]) == 0, command
        said = capsys.readouterr().out
        assert "nothing of rank0-attempt7.gwj can be read" in said, command
        assert "no incident is missing" not in said
        assert "killed: " not in said
    main([*READERS[5], str(beside)])
    assert "process 7: nothing of its journal can be read" in capsys.readouterr().out
    journal = alone / "rank1-attempt0.gwj"
    shutil.copy(beside / "rank0-attempt0.gwj", journal)
    for command in (READERS[0], *READERS[3:]):
        assert main([*command, str(alone)]) == 2, command
        assert "nothing of rank 0" in (said := capsys.readouterr().err), command
        assert said.endswith("other ranks: --rank 1\n")


def test_a_folder_without_a_journal_is_no_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe or a link with the name of one, newer than all: the newest run is the one that has a journal."""
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    for name, make in (("pipe", os.mkfifo), ("link", lambda path: os.symlink("/dev/zero", path))):
        (folder / name).mkdir()
        make(str(folder / name / "rank0-attempt0.gwj"))
    assert main(["explain", "non-finite-0-2", "--dir", str(folder)]) == 0
    assert "the backward of sqrt" in capsys.readouterr().out


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without runs is an error that says what to do."""
    assert main(["explain", "--dir", str(tmp_path)]) == 2
    assert "name the folder of a run" in capsys.readouterr().err
    assert main(["explain", "--dir", str(tmp_path / "absent")]) == 2
    assert "gradwatch run -- python train.py" in capsys.readouterr().err


def test_a_run_that_ended_without_its_account(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a process was killed "no rule fired" is said of the steps recorded only."""
    said = "the journal has no end"
    assert main(["explain", "--dir", str(runs)]) == 0
    assert said not in capsys.readouterr().out
    code = (
        "import os, signal, torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "for step in range(3):\n"
        "    model(torch.ones(2, 3)).sum().backward()\n"
        "    optimizer.step()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert execute([*GRADWATCH, "run", "--", sys.executable, "-c", code], tmp_path).status == -signal.SIGKILL
    folder = str(tmp_path / "gradwatch-runs")
    assert main(["explain", "--dir", folder]) == 1
    assert said in capsys.readouterr().out
    assert main(["explain", "--markdown", "--dir", folder]) == 1
    assert said in capsys.readouterr().out
    assert main(["explain", "--json", "--dir", folder]) == 1
    assert json.loads(capsys.readouterr().out)["unfinished"] is True
