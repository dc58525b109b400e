"""Discovery by file: on the list while training, off it at a clean exit, mourned when killed."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwatch.endpoint.address import Address
from gradwatch.errors import AttachError
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.process_identity import is_running, start_ticks
from gradwatch.sinks import make_sink
from gradwatch.sinks.prometheus.file_sd import (
    MOURNING_SECONDS,
    remove_target,
    sweep,
    target_address,
    write_target,
)
from tests.support.sink_records import make_run, serving

HERE = Address("127.0.0.1", 29440)


def entry(path: Path) -> dict[str, Any]:
    (group,) = json.loads(path.read_text(encoding="utf-8"))
    return dict(group)


def write(folder: Path, **fields: Any) -> Path:
    run = make_run(folder, host=platform.node(), **fields)
    return Path(write_target(str(folder), run, HERE))


def died(path: Path) -> None:
    """Make the entry that of a process which has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    group = entry(path)
    group["labels"]["__meta_gradwatch_pid"] = str(gone.pid)
    path.write_text(json.dumps([group]), encoding="utf-8")


def test_an_open_endpoint_is_on_the_list_and_a_closed_one_is_not(tmp_path: Path) -> None:
    """What Prometheus needs: address and labels; nothing that changes with the port; readable by others."""
    targets = tmp_path / "targets"
    with serving(tmp_path, file_sd=str(targets)) as sink:
        (path,) = targets.iterdir()
        group = entry(path)
        assert sink.url == f"http://{group['targets'][0]}/metrics"
        kept = {key: value for key, value in group["labels"].items() if not key.startswith("__meta_")}
        assert kept == {"run_id": "run-1", "rank": "0", "instance": "run-1/0"}
        assert stat.S_IMODE(path.stat().st_mode) & 0o444
    assert list(targets.iterdir()) == []


def test_every_rank_has_its_own_entry(tmp_path: Path) -> None:
    """Eight processes of one machine never share a file, so none can lose another's entry."""
    for rank in range(8):
        write(tmp_path, rank=rank)
    assert sorted(entry(path)["labels"]["rank"] for path in tmp_path.iterdir()) == list("01234567")


def test_every_process_of_a_rank_has_its_own_entry(tmp_path: Path) -> None:
    """The first one has the labels that it always had; each takes away what it listens on, and no other's."""
    first, second = write(tmp_path), write(tmp_path, place=1)
    kept = [
        {key: value for key, value in entry(path)["labels"].items() if not key.startswith("__meta_")}
        for path in (first, second)
    ]
    assert kept == [
        {"run_id": "run-1", "rank": "0", "instance": "run-1/0"},
        {"run_id": "run-1", "rank": "0", "process": "1", "instance": "run-1/0/1"},
    ]
    remove_target(
        str(first), HERE._replace(port=HERE.port + 1)
    )  # a watch of this process that had the file before
    assert first.exists()
    remove_target(str(first), HERE)
    assert list(tmp_path.iterdir()) == [second]


def test_a_list_that_cannot_be_written_costs_only_the_list(tmp_path: Path) -> None:
    """The endpoint serves all the same, and the fault is counted."""
    (tmp_path / "file").touch()
    health = Health()
    with serving(tmp_path, health, file_sd=str(tmp_path / "file")) as sink:
        assert sink.url is not None
        assert health.errors() == {"prometheus": 1}


def test_a_late_close_leaves_the_entry_of_the_restart(tmp_path: Path) -> None:
    """The attempt that took over has the file now."""
    path = write(tmp_path)
    died(path)
    remove_target(str(path), HERE)
    assert path.exists()


def test_the_dead_are_mourned_for_a_quarter_of_an_hour(tmp_path: Path) -> None:
    """From when they were noticed: a run of a week must not vanish the moment it is killed."""
    path, alive = write(tmp_path), write(tmp_path, rank=1)
    died(path)
    os.utime(path, (1, 1))
    now = time.time()
    sweep(str(tmp_path), now)
    assert entry(path)["targets"] == ["127.0.0.1:29440"]
    sweep(str(tmp_path), now + MOURNING_SECONDS - 2)
    assert path.exists()
    sweep(str(tmp_path), now + MOURNING_SECONDS + 2)
    assert not path.exists()
    assert alive.exists()


def test_a_dead_entry_goes_when_another_process_gets_its_port(tmp_path: Path) -> None:
    """Else Prometheus would scrape the new process as the dead one: its numbers under the other run's name."""
    dead, alive = write(tmp_path), write(tmp_path, rank=1)
    died(dead)
    elsewhere = entry(dead)
    elsewhere["labels"]["__meta_gradwatch_node"] = "another"
    (tmp_path / "gradwatch-far-rank0.json").write_text(json.dumps([elsewhere]))
    run = replace(make_run(tmp_path, host=platform.node()), run_id="next")
    write_target(str(tmp_path), run, Address("0.0.0.0", HERE.port + 1))
    assert dead.exists()
    write_target(str(tmp_path), run, Address("0.0.0.0", HERE.port))
    assert not dead.exists()
    assert alive.exists()
    assert (tmp_path / "gradwatch-far-rank0.json").exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[[[[" * 15_000,
        "[]",
        "{}",
        "[1]",
        '[{"labels": 3}]',
        '[{"labels": {"__meta_gradwatch_pid": "x"}}]',
        "\udcff",
    ],
)
def test_foreign_and_half_written_entries_are_left_alone(content: str, tmp_path: Path) -> None:
    """Nothing is raised, nothing is removed."""
    path = tmp_path / "gradwatch-x-rank0.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    sweep(str(tmp_path), time.time())
    remove_target(str(path), HERE)
    assert path.read_bytes() == content.encode("utf-8", "surrogateescape")


def test_a_fifo_and_a_link_cost_a_line_and_no_training(tmp_path: Path) -> None:
    """In a shared folder anything may lie under an entry's name: reading it must not wait, nor follow it."""
    folder = tmp_path / "targets"
    folder.mkdir()
    os.mkfifo(folder / "gradwatch-x-rank0.json")
    (folder / "gradwatch-y-rank0.json").symlink_to(folder / "gradwatch-x-rank0.json")
    said: list[str] = []
    sink = make_sink("prometheus", {"listen": "127.0.0.1:0", "file_sd": str(folder)})
    health = Health(lambda component, error: said.append(f"{component}: {error}"))
    sink.open(make_run(tmp_path, host=platform.node()), health)
    assert len(list(folder.glob("*.json"))) == 3
    sink.close()
    assert len(said) == 1
    assert "not changed: gradwatch-x-rank0.json, gradwatch-y-rank0.json" in said[0]
    assert sorted(path.name for path in folder.iterdir()) == [
        "gradwatch-x-rank0.json",
        "gradwatch-y-rank0.json",
    ]


def test_another_machines_processes_are_not_ours_to_judge(tmp_path: Path) -> None:
    """On a shared file system a process number of another node says nothing here."""
    path = write(tmp_path)
    died(path)
    group = entry(path)
    group["labels"]["__meta_gradwatch_node"] = "another"
    path.write_text(json.dumps([group]))
    before = path.read_text(encoding="utf-8")
    sweep(str(tmp_path), time.time())
    assert path.read_text(encoding="utf-8") == before


def test_an_endpoint_open_to_all_is_reached_by_name() -> None:
    """Prometheus on another machine cannot scrape 0.0.0.0."""
    assert target_address(Address("0.0.0.0", 29440), "node-1") == "node-1:29440"
    assert target_address(Address("::1", 29440), "node-1") == "[::1]:29440"


def test_a_process_number_given_to_somebody_else_is_not_us() -> None:
    """The start time tells; a zombie and a number of nobody are not running."""
    me = os.getpid()
    assert is_running(me, start_ticks(me))
    assert not is_running(me, start_ticks(me) - 1)
    assert not is_running(0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid)
    child.wait()
    assert start_ticks(child.pid) == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_stall_needs_a_time(seconds: float) -> None:
    """Refused when the sink is made, before training."""
    with pytest.raises(AttachError, match="stall_seconds"):
        make_sink("prometheus", {"stall_seconds": seconds})
