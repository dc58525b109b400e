"""What `gradwatch serve` makes of run folders: how each run ended, and its last counters."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gradwatch.account import Ending
from gradwatch.journal.entries import LostEntry
from gradwatch.records.decision import Decision
from gradwatch.runtime.internal_errors import Health
from gradwatch.serve.allowed_targets import AllowedTargets
from gradwatch.serve.responses import metrics, runs, sd
from gradwatch.serve.run_scanner import Fleet
from gradwatch.serve.runs_page import fleet_page
from gradwatch.sinks.journal import JournalSink
from gradwatch.sinks.prometheus.exposition import render
from gradwatch.sinks.prometheus.final_metrics import final_families
from gradwatch.sinks.prometheus.metric_catalogue import METRICS
from gradwatch.sinks.prometheus.metric_values import families
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.deploy.run_folders import SITES, a_run, history, record_run, scan, series
from tests.support.binaries import require
from tests.support.sink_records import make_event, make_record


def test_a_finished_run_keeps_its_last_counters(tmp_path: Path, dead_pid: int) -> None:
    """The same numbers that the process itself would have shown in a last scrape."""
    run = a_run(tmp_path, pid=dead_pid)
    records = record_run(run, history())
    (member,) = scan(tmp_path).members
    assert member.state == "finished"
    assert member.summary is not None
    live = PrometheusSink(None, params="off")
    live.open(run, Health())
    for record in records:
        live.write(record)
    expected = series(render(final_families(families(live.view()))))
    served = series(render(final_families(families(member.summary.view()))))
    # A summary has an end, and nobody's health; all else is equal, nonfinite elements and histograms included.
    ours = {"gradwatch_run_end_timestamp_seconds{}", "gradwatch_run_outcome{outcome=finished}"}
    assert served.keys() - expected.keys() == ours
    assert {name: value for name, value in expected.items() if served.get(name) != pytest.approx(value)} == {}


@pytest.mark.parametrize(
    ("last", "ended", "outcome"),
    [
        (None, "finished", "finished"),
        (Decision(stop=True), "finished", "stopped"),
        (None, "stopped", "stopped"),
        (None, "failed", "failed"),
        (None, "", "died"),
    ],
)
def test_how_it_ended(
    last: Decision | None, ended: Ending, outcome: str, tmp_path: Path, dead_pid: int
) -> None:
    """Closed in order, stopped by a rule or by Ctrl-C, ended by an exception, or killed."""
    close = bool(ended)
    record_run(a_run(tmp_path, pid=dead_pid), history(last=last), close, ended)
    fleet = scan(tmp_path)
    assert [member.state for member in fleet.members] == [outcome]
    text = metrics(fleet, 60).body.decode()
    assert f'outcome="{outcome}"' in text
    assert f'gradwatch_serve_processes{{state="{outcome}"}} 1' in text
    assert json.loads(runs(fleet).body)[0]["state"] == outcome
    labels = 'job="gradwatch",run_id="run-1",rank="0",instance="run-1/0"'
    assert (f"gradwatch_steps_total{{{labels}}} 20" in text) == close
    assert 'gradwatch_rule_firings_total{job="gradwatch"' in text
    assert "gradwatch_last_step_timestamp_seconds" not in text
    page = fleet_page(fleet, time.time()).body.decode()
    assert page.count("<tr>") == 2
    red = re.findall(r"[{}]([^{}]*)\{color:#(?:c4161c|ff7b72)\}", page)
    assert [f".{outcome}" in colour for colour in red] == [outcome in ("stopped", "failed", "died")] * 2


def test_the_gravest_firings_are_shown_and_the_others_counted(tmp_path: Path, dead_pid: int) -> None:
    """Five of eight, a critical one first though it is the oldest, and that three more fired."""
    records = history()
    for step in range(10, 17):
        event = make_event(step=step, rule=f"rule-{step}", severity="info" if step == 16 else "warning")
        records[step] = make_record(SITES, step=step, events=(event,))
    record_run(a_run(tmp_path, pid=dead_pid), records)
    fleet = scan(tmp_path)
    expected = ["step 2: non-finite (critical)", *(f"step {n}: rule-{n} (warning)" for n in (12, 13, 14, 15))]
    assert json.loads(runs(fleet).body)[0]["recent"] == expected
    page = fleet_page(fleet, time.time()).body.decode()
    assert re.findall(r"step \d+: [^<]*|and \d+ more", page) == [*expected, "and 3 more"]


def test_no_counter_goes_back(tmp_path: Path, dead_pid: int) -> None:
    """Of a killed process the last steps were scraped and not recorded: none of its counters is less than a scrape's.

    Prometheus takes a counter that falls for one that began anew: all its steps would count again, in one moment.
    """
    run, records = a_run(tmp_path / "live", pid=dead_pid), history(40)
    live = PrometheusSink(None, params="off")
    live.open(run, Health())
    for record in records:
        live.write(record)
    # A firing is written at once, the row of its step later: this one's never was.
    fired = replace(records[30], verdict=records[2].verdict)
    live.write(fired)
    acknowledged = threading.Event()
    sink = JournalSink()
    sink.on_acknowledged = lambda event: acknowledged.set()
    sink.open(run, Health())
    for record in records[:30]:
        sink.write(record)
    assert sink.flush(10)
    acknowledged.clear()
    sink.write(fired)
    assert acknowledged.wait(60)
    dead = kill(sink, tmp_path)
    scraped = {metric_of(name): value for name, value in series(live.render()).items()}
    served = {
        metric_of(name): value
        for name, value in series(metrics(scan(dead), 60).body).items()
        if "run_id=run-1" in name and name.startswith(COUNTED)
    }
    assert served
    assert {name: value for name, value in served.items() if value < scraped[name]} == {}
    assert any("gradwatch_rule_firings_total" in name and value == 2 for name, value in served.items())


def kill(sink: JournalSink, folder: Path) -> Path:
    """The run folder as SIGKILL would leave it at this moment; its root."""
    shutil.copytree(folder / "live", folder / "dead")
    sink.close()
    return folder / "dead"


COUNTED = tuple(metric.name for metric in METRICS if metric.kind != "gauge")


def metric_of(name: str) -> str:
    """A series without the labels that service discovery adds."""
    return re.sub(r"(instance|job|rank|run_id)=[^,}]*,?", "", name).replace(",}", "}")


@pytest.mark.parametrize(
    ("lost", "told"), [({"events": 1}, False), ({"rotated": 4096}, False), ({"norms": 1}, True)]
)
def test_firings_are_not_told_where_events_were_given_up(
    lost: dict[str, int], told: bool, tmp_path: Path, dead_pid: int
) -> None:
    """A full queue, or a journal cut to its cap: what is left is no count."""
    sink = JournalSink()
    sink.open(a_run(tmp_path / "live", pid=dead_pid), Health())
    for record in history():
        sink.write(record)
    sink._unrecorded |= LostEntry(**lost)  # as when the queue is full
    assert sink.flush(10)
    dead = kill(sink, tmp_path)
    (member,) = scan(dead).members
    assert member.summary is not None
    assert member.summary.known == ("firings" if told else "nothing")
    text = metrics(scan(dead), 60).body
    assert (b'gradwatch_rule_firings_total{job="gradwatch"' in text) == told
    assert b'outcome="died"' in text


def test_a_live_process_is_a_target_and_its_journal_is_not_read(tmp_path: Path) -> None:
    """Found by its endpoint file; gone from the list at its clean exit."""
    run = a_run(tmp_path)
    sink = PrometheusSink("127.0.0.1:0")
    sink.open(run, Health())
    record_run(run, history(), close=False)
    fleet = scan(tmp_path)
    (group,) = json.loads(sd(fleet).body)
    assert sink.url == f"http://{group['targets'][0]}/metrics"
    assert group["labels"] == {"run_id": "run-1", "rank": "0", "instance": "run-1/0"}
    assert (fleet.members[0].state, fleet.members[0].summary) == ("running", None)
    sink.close()
    assert json.loads(sd(scan(tmp_path)).body) == []


def test_a_killed_process_is_mourned_and_then_forgotten(tmp_path: Path, dead_pid: int) -> None:
    """Prometheus is to find it down for a quarter of an hour, also across restarts of serve."""
    run = a_run(tmp_path, pid=dead_pid)
    record_run(run, history(), close=False)
    endpoint = tmp_path / "run-1" / "endpoint-rank0.json"
    says = {"host": "127.0.0.1", "port": 29440, "pid": dead_pid, "run_id": "run-1", "rank": 0, "attempt": 0}
    endpoint.write_text(json.dumps({**says, "node": platform.node()}))
    fleet = scan(tmp_path)
    assert [member.state for member in fleet.members] == ["died"]
    assert [group["targets"] for group in json.loads(sd(fleet).body)] == [["127.0.0.1:29440"]]
    long_ago = time.time() - 1000
    for path in (tmp_path / "run-1").iterdir():
        os.utime(path, (long_ago, long_ago))
    assert json.loads(sd(scan(tmp_path)).body) == []


def test_a_killed_process_is_no_target_when_another_has_its_port(tmp_path: Path, dead_pid: int) -> None:
    """Else Prometheus would scrape the new process as the dead one: its numbers under the other run's name."""
    for run_id, pid in (("killed", dead_pid), ("next", os.getpid())):
        (tmp_path / run_id).mkdir()
        says = {"host": "127.0.0.1", "port": 29440, "pid": pid, "run_id": run_id, "rank": 0, "attempt": 0}
        (tmp_path / run_id / "endpoint-rank0.json").write_text(json.dumps({**says, "node": platform.node()}))
    fleet = scan(tmp_path)
    assert {member.run_id: member.state for member in fleet.members} == {"killed": "died", "next": "running"}
    assert [group["labels"]["run_id"] for group in json.loads(sd(fleet).body)] == ["next"]


def test_a_loopback_of_another_machine_is_no_target(tmp_path: Path) -> None:
    """Prometheus would look for it on its own: whoever listens there would be taken for that process."""
    (tmp_path / "far").mkdir()
    says = {"host": "127.0.0.1", "port": 29440, "pid": 1, "run_id": "far", "rank": 0, "attempt": 0}
    (tmp_path / "far" / "endpoint-rank0.json").write_text(json.dumps({**says, "node": "node-9"}))
    fleet = scan(tmp_path)
    assert [member.state for member in fleet.members] == ["running"]
    assert json.loads(sd(fleet).body) == []
    assert b"http://127.0.0.1:29440" not in fleet_page(fleet, time.time()).body


def test_a_restart_takes_the_place_of_its_first_attempt(tmp_path: Path, dead_pid: int) -> None:
    """The counters of attempt 0 must not be served beside the live ones of attempt 1."""
    record_run(a_run(tmp_path, pid=dead_pid), history(), close=False)
    again = a_run(tmp_path, attempt=1)
    sink = PrometheusSink("127.0.0.1:0")
    sink.open(again, Health())
    record_run(again, history(5), close=False)
    fleet = scan(tmp_path)
    assert [(member.state, member.rank) for member in fleet.members] == [("running", 0)]
    assert "gradwatch_steps_total" not in metrics(fleet, 60).body.decode()
    sink.close()


def test_a_restart_by_hand_is_a_target(tmp_path: Path, dead_pid: int) -> None:
    """No launcher counts its attempts: its journal has another number than its endpoint file, and is its own."""
    record_run(a_run(tmp_path, pid=dead_pid), history(), close=False)
    again = a_run(tmp_path)
    with closing(PrometheusSink("127.0.0.1:0")) as sink:
        sink.open(again, Health())
        record_run(again, history(5), close=False)
        fleet = scan(tmp_path)
        assert [(member.state, member.script) for member in fleet.members] == [("running", "train.py")]
        assert [group["labels"]["instance"] for group in json.loads(sd(fleet).body)] == ["run-1/0"]


def test_an_endpoint_file_that_is_older_than_the_journal_is_not_its_own(
    tmp_path: Path, dead_pid: int
) -> None:
    """Left by a killed process whose successor serves nothing; and one whose successor records nothing."""
    record_run(a_run(tmp_path, pid=dead_pid), history(), close=False)
    path = tmp_path / "run-1" / "endpoint-rank0.json"
    says = {"host": "127.0.0.1", "port": 29440, "pid": dead_pid, "run_id": "run-1", "rank": 0, "attempt": 0}
    path.write_text(json.dumps({**says, "node": platform.node()}))
    os.utime(path, (time.time() - 60,) * 2)
    record_run(a_run(tmp_path), history(5), close=False)
    (member,) = scan(tmp_path).members
    assert (member.state, member.address) == ("running", None)
    path.write_text(json.dumps({**says, "node": platform.node(), "pid": os.getppid()}))
    (member,) = scan(tmp_path).members
    assert (member.state, str(member.address)) == ("running", "127.0.0.1:29440")


def test_each_place_of_a_rank_keeps_its_last_counters(tmp_path: Path, dead_pid: int) -> None:
    """The newest journal of each, under labels of its own; one of an earlier version is of the first."""
    for attempt, place in enumerate((0, 1, 0, 2)):
        record_run(a_run(tmp_path, pid=dead_pid, attempt=attempt, place=place), history(10 + attempt))
    fleet = scan(tmp_path)
    found = series(metrics(fleet, 60).body)
    steps = {name: value for name, value in found.items() if name.startswith("gradwatch_steps_total")}
    assert steps == {
        "gradwatch_steps_total{instance=run-1/0,job=gradwatch,rank=0,run_id=run-1}": 12,
        "gradwatch_steps_total{instance=run-1/0/1,job=gradwatch,process=1,rank=0,run_id=run-1}": 11,
        "gradwatch_steps_total{instance=run-1/0/2,job=gradwatch,process=2,rank=0,run_id=run-1}": 13,
    }
    told = [(one["rank"], one["process"], one["steps"]) for one in json.loads(runs(fleet).body)]
    assert sorted(told) == [(0, 0, 12), (0, 1, 11), (0, 2, 13)]
    assert "<td>0, process 2<td>" in fleet_page(fleet, time.time()).body.decode()


@pytest.mark.parametrize(
    ("host", "allowed", "handed_out"),
    [
        ("203.0.113.7", [], False),
        ("203.0.113.7", ["203.0.113.0/24"], True),
        ("203.0.113.7", ["10.0.0.0/8", "node-9"], False),
        ("127.0.0.2", [], True),
        ("fe80::1", [], False),
    ],
)
def test_only_addresses_of_this_machine_or_allowed_ones(
    host: str, allowed: list[str], handed_out: bool, tmp_path: Path
) -> None:
    """An endpoint file of this machine's name must not send Prometheus to any address in the network."""
    (tmp_path / "run").mkdir()
    says = {"host": host, "port": 80, "pid": os.getpid(), "run_id": "run", "rank": 0, "attempt": 0}
    path = tmp_path / "run" / "endpoint-rank0.json"
    path.write_text(json.dumps({**says, "node": platform.node()}))
    fleet = scan(tmp_path, reach=AllowedTargets.parse("", allowed))
    assert [group["targets"] for group in json.loads(sd(fleet).body)] == (
        [[f"{host}:80"]] if handed_out else []
    )
    assert len(fleet.refused) == (not handed_out)


def test_an_open_endpoint_of_another_machine(tmp_path: Path) -> None:
    """Refused unless allowed by its machine's name, or handed out by the operator's own name for it."""
    (tmp_path / "far").mkdir()
    says = {"host": "0.0.0.0", "port": 29440, "pid": 1, "run_id": "far", "rank": 3, "attempt": 0}
    path = tmp_path / "far" / "endpoint-rank3.json"
    path.write_text(json.dumps({**says, "node": "node-9"}))
    fleet = scan(tmp_path)
    assert json.loads(sd(fleet).body) == []
    assert [str(member.refused) for member in fleet.refused] == ["0.0.0.0:29440"]
    assert b"gradwatch_serve_refused_targets 1" in metrics(fleet, 60).body
    fleet = scan(tmp_path, reach=AllowedTargets.parse("", ["node-9"]))
    assert json.loads(sd(fleet).body)[0]["targets"] == ["node-9:29440"]
    assert fleet.refused == ()
    fleet = scan(tmp_path, reach=AllowedTargets.parse("gateway", []))
    assert json.loads(sd(fleet, "gateway").body)[0]["targets"] == ["gateway:29440"]
    os.utime(path, (1, 1))
    assert scan(tmp_path).members[0].state == "silent"


def test_copies_of_a_run_do_not_void_the_scrape(tmp_path: Path, dead_pid: int) -> None:
    """Equal series twice would; the copy that last gave a sign of life is shown."""
    record_run(a_run(tmp_path / "a", pid=dead_pid), history())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    record_run(a_run(tmp_path / "a", "run-2", pid=dead_pid), history())
    fleet = scan(tmp_path / "a", tmp_path / "b")
    assert sorted(member.run_id for member in fleet.members) == ["run-1", "run-2"]
    found = series(metrics(fleet, 60).body)
    assert found["gradwatch_serve_processes{state=finished}"] == 2


def test_promtool_finds_nothing_to_say(tmp_path: Path, dead_pid: int) -> None:
    """A page of ended runs and of serve's own metrics, linted by Prometheus' own tool."""
    for number in range(3):
        record_run(a_run(tmp_path, f"run-{number}", pid=dead_pid), history())
    body = metrics(scan(tmp_path), 60).body
    done = subprocess.run(
        [require("promtool"), "check", "metrics"], input=body, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_only_what_ended_lately_is_served_and_not_without_bound(tmp_path: Path, dead_pid: int) -> None:
    """Runs of last week are history of Prometheus, not of this page; the fleet page still has them."""
    record_run(a_run(tmp_path, pid=dead_pid), history())
    fleet = scan(tmp_path)
    later = Fleet(fleet.members, fleet.scanned_at + 7200, 0.0)
    assert b"gradwatch_steps_total" not in metrics(later, 3600).body
    assert b"run-1" in fleet_page(later, time.time()).body
    many = Fleet(fleet.members * 1000, fleet.scanned_at, 0.0)
    assert len(many.ended_since(0.0, 200)) == 200
    assert b"500 older ones are not shown" in fleet_page(many, time.time()).body
