"""The pages people open, in a real browser: what they show, and that nothing in them is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.deploy.run_folders import a_run, history, record_run
from tests.deploy.servers import wait_until
from tests.serve.test_server import fetch, served
from tests.support.binaries import require

HOSTILE = "<img src=x onerror=document['title']='owned'>"
RULES = """
version: 1
rules:
  too-large:
    detect: {kind: above, of: norm, threshold: 0}
    annotations: {summary: "{param} is large"}
"""


def seen(url: str, folder: Path) -> str:
    """The document as Chromium has it after three seconds, scripts and handlers run."""
    command = [
        require("chromium"),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
    ]
    done = subprocess.run(
        [*command, "--virtual-time-budget=3000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.timeout(180)
def test_the_page_of_a_run_shows_names_and_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script whose name is HTML is text in the page: no element is made of it, and no handler has run."""
    monkeypatch.setattr(sys, "argv", [HOSTILE])
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), run_dir=tmp_path / "runs", listen="127.0.0.1:0"
    ) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert gw.flush()
        assert gw.url is not None
        page = seen(gw.url.removesuffix("metrics"), tmp_path / "browser")
    assert "<title>gradwatch: firing: too-large</title>" in page
    assert "&lt;img src=x" in page
    assert "<img" not in page
    assert gw.run.run_id in page


@pytest.mark.timeout(180)
def test_the_page_of_a_fleet_lists_its_runs(tmp_path: Path, dead_pid: int) -> None:
    """Every run folder is a row of a real table, with how the run ended."""
    for run_id in ("night-1", "night-2"):
        record_run(a_run(tmp_path / "runs", run_id, pid=dead_pid), history())
    with served(tmp_path / "runs") as url:
        wait_until(lambda: "night-1" in fetch(f"{url}/")[2], "the first look is over")
        page = seen(f"{url}/", tmp_path / "browser")
    rows = [row for row in page.split("<tr")[1:] if "night-" in row]
    assert len(rows) == 2
    assert all("</td>" in row for row in rows)  # a browser closes what the page left open
