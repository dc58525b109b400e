"""Run folders half-written, hostile, copied, and by the thousand, as `gradwatch serve` finds them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradwatch.records.run_info import RunInfo
from gradwatch.serve.ended_run_counters import Summaries
from gradwatch.serve.process_discovery import processes, read_endpoint
from gradwatch.serve.responses import metrics
from gradwatch.serve.run_scanner import Scanner
from gradwatch.serve.runs_page import fleet_page
from tests.deploy.run_folders import a_run, history, record_run, scan, series

GOOD = {"host": "127.0.0.1", "port": 1, "pid": 1, "run_id": "r", "rank": 0, "attempt": 0, "node": "n"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b"[" * 60_000,
        *(
            json.dumps({**GOOD, **wrong}).encode()
            for wrong in (
                {"host": "evil.example"},
                {"port": 0},
                {"port": "29440"},
                {"pid": -1},
                {"rank": 1.5},
                {"run_id": 7},
                {"run_id": "x" * 2000},
                {"node": None},
                {"attempt": True},
                {"started": "now"},
                {"place": -1},
                {"place": "1"},
                {"place": 1 << 40},
            )
        ),
    ],
)
def test_an_endpoint_file_that_makes_no_sense_is_no_endpoint(content: bytes, tmp_path: Path) -> None:
    """Half-written, hostile or of another program: passed over, never an error."""
    path = tmp_path / "endpoint-rank0.json"
    path.write_bytes(content)
    assert read_endpoint(path) is None
    assert processes(tmp_path) == []


def test_an_endpoint_file_of_another_name_is_no_endpoint(tmp_path: Path) -> None:
    """A copy, or one that claims the place of another process."""
    for name in (
        "endpoint-rank0-2.json",
        "endpoint-rank1.json",
        "endpoint-rank0-.json",
        "endpoint-rank0-1.json.1",
    ):
        (tmp_path / name).write_text(json.dumps({**GOOD, "place": 1}))
    assert processes(tmp_path) == []
    (tmp_path / "endpoint-rank0-1.json").write_text(json.dumps({**GOOD, "place": 1}))
    assert [(each.rank, each.place) for each in processes(tmp_path)] == [(0, 1)]


def test_neither_links_nor_pipes_are_opened(tmp_path: Path) -> None:
    """A link could lead anywhere, a pipe would hang for ever."""
    real = tmp_path / "real.json"
    real.write_text(json.dumps(GOOD))
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "endpoint-rank0.json").symlink_to(real)
    os.mkfifo(folder / "endpoint-rank1.json")
    os.mkfifo(folder / "rank2-attempt0.gwj")
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    assert scan(tmp_path / "runs").members == ()


def test_a_journal_cut_anywhere_is_a_run_that_died(tmp_path: Path, dead_pid: int) -> None:
    """At every length: no error, never more steps than were taken."""
    record_run(a_run(tmp_path / "whole", pid=dead_pid), history())
    journal = tmp_path / "whole" / "run-1" / "rank0-attempt0.gwj"
    content = journal.read_bytes()
    (tmp_path / "cut" / "run-1").mkdir(parents=True)
    states = set()
    for length in range(0, len(content), 97):
        (tmp_path / "cut" / "run-1" / journal.name).write_bytes(content[:length])
        (member,) = scan(tmp_path / "cut").members
        states.add(member.state)
        assert member.summary is None or member.summary.steps <= 20
    assert states <= {"died", "unreadable", "running"}
    assert "died" in states
    cut = tmp_path / "cut" / "run-1" / journal.name
    cut.write_bytes(b"")
    os.utime(cut, (time.time() - 120,) * 2)
    (member,) = scan(tmp_path / "cut").members
    assert member.state == "unreadable"  # two minutes are too long for a journal that is about to begin


def test_folders_that_cannot_be_read_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run folders are private, and may not exist yet: then there is nothing to say."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "file").touch()

    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refuse)
    assert scan(tmp_path, tmp_path / "file", tmp_path / "nowhere").members == ()


def test_hostile_names_reach_nobody(tmp_path: Path, dead_pid: int) -> None:
    """A run called <script> is text on the page and one label in the scrape."""
    name = '<script>alert(1)</script>"\\\n'
    run = a_run(tmp_path, "run-1", pid=dead_pid)
    record_run(RunInfo(**{**{n: getattr(run, n) for n in run.__slots__}, "run_id": name}), history())
    fleet = scan(tmp_path)
    assert b"<script>" not in fleet_page(fleet, time.time()).body
    assert any("script" in key for key in series(metrics(fleet, 60).body))


# -- restarts and sizes --------------------------------------------------------------------------------------


def test_a_restart_reads_no_journal_again(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summaries are kept, and believed only while the journal is what it was."""
    record_run(a_run(tmp_path / "runs", pid=dead_pid), history())
    state = str(tmp_path / "state")
    first = scan(tmp_path / "runs", state=state)
    (kept,) = (tmp_path / "state").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    read: list[Any] = []
    summarise = sys.modules["gradwatch.serve.ended_run_counters"].summarise
    monkeypatch.setattr(
        "gradwatch.serve.ended_run_counters.summarise",
        lambda process: read.append(process) or summarise(process),
    )
    second = scan(tmp_path / "runs", state=state)
    assert read == []
    assert (
        metrics(second, 60).body.split(b"# HELP gradwatch_serve")[0]
        == (metrics(first, 60).body.split(b"# HELP gradwatch_serve")[0])
    )
    for spoilt in (
        b"",
        kept.read_bytes()[:100],
        b'{"format": 1}',
        kept.read_bytes().replace(b'"steps":20', b'"steps":"x"'),
    ):
        kept.write_bytes(spoilt)
        assert metrics(scan(tmp_path / "runs", state=state), 60).body.count(b"gradwatch_steps_total{") == 1
        assert len(read) == 1
        read.clear()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, dead_pid: int) -> None:
    """A file where the folder should be."""
    record_run(a_run(tmp_path / "runs", pid=dead_pid), history())
    (tmp_path / "file").touch()
    assert scan(tmp_path / "runs", state=str(tmp_path / "file")).members[0].state == "finished"


def test_thousands_of_finished_runs(tmp_path: Path, dead_pid: int) -> None:
    """1,000 runs: found once; the next look neither reads nor lists them again, and a new one is found."""
    record_run(a_run(tmp_path / "one", pid=dead_pid), history())
    journal = (tmp_path / "one" / "run-1" / "rank0-attempt0.gwj").read_bytes()
    for number in range(1000):
        folder = tmp_path / "runs" / f"run-{number}"
        folder.mkdir(parents=True)
        (folder / "rank0-attempt0.gwj").write_bytes(journal)
    scanner = Scanner([tmp_path / "runs"], Summaries(""))
    scanner.scan()
    assert len(scanner._unchanged) == 1000
    listed: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gradwatch.serve.run_scanner.processes",
            lambda folder, owner_of: listed.append(folder) or processes(folder, owner_of),
        )
        assert len(scanner.scan().members) == 1  # all of them say they are run-1
        assert listed == []
        record_run(a_run(tmp_path / "runs", "new", pid=dead_pid), history())
        assert {member.run_id for member in scanner.scan().members} == {"run-1", "new"}
        assert listed == [tmp_path / "runs" / "new"]
        shutil.rmtree(tmp_path / "runs" / "new")
        assert {member.run_id for member in scanner.scan().members} == {"run-1"}
