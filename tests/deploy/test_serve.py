"""`gradwatch serve`: what it makes of folders, whole, half-written or hostile, and what it tells whom."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gradwatch.cli import main
from gradwatch.health import Health
from gradwatch.serve import Server
from gradwatch.serve.answers import metrics, sd
from gradwatch.serve.discover import processes, read_endpoint
from gradwatch.serve.fleet import Fleet, Scanner
from gradwatch.serve.page import fleet_page
from gradwatch.serve.summary import Summaries
from gradwatch.sinks.exposition import render
from gradwatch.sinks.families import families
from gradwatch.sinks.http import RequestError
from gradwatch.sinks.journal import JournalSink
from gradwatch.sinks.lasting import lasting
from gradwatch.sinks.listen import Address
from gradwatch.sinks.prometheus import PrometheusSink
from gradwatch.sinks.targets import write_target
from gradwatch.snapshot import Decision, Record, RunInfo
from tests.binaries import require
from tests.sink_records import make_event, make_record, make_run, make_sites, skip

SITES = make_sites(4)


def a_run(root: Path, run_id: str = "run-1", **fields: Any) -> RunInfo:
    """A run of this machine whose folder lies in `root`."""
    run = make_run(root, host=platform.node(), start_time=time.time(), script="train.py", **fields)
    return RunInfo(
        **{
            **{name: getattr(run, name) for name in run.__slots__},
            "run_id": run_id,
            "directory": str(root / run_id),
        }
    )


def history(steps: int = 20, last: Decision | None = None) -> list[Record]:
    """A few steps; the third has NaN in one gradient, is skipped, and fires a rule."""
    records = []
    for step in range(steps):
        norm = np.ones(4, np.float32)
        if step == 2:
            norm[1] = np.nan
        records.append(
            make_record(
                SITES,
                norm,
                step=step,
                events=(make_event(step=step, sites=("layers.1.weight",), count=1),) if step == 2 else (),
                decision=skip() if step == 2 else last if step == steps - 1 else None,
                wall_time=time.time(),
            )
        )
    return records


def record_run(run: RunInfo, records: list[Record], close: bool = True) -> list[Record]:
    """Write a journal as training does; not closed, it is what a kill leaves."""
    sink = JournalSink()
    sink.open(run, Health())
    for record in records:
        sink.write(record)
    assert sink.flush(10)
    if close:
        sink.close()
    else:
        sink._forget()
    return records


def scan(*roots: Path, state: str = "") -> Fleet:
    return Scanner(roots, Summaries(state)).scan()


def series(text: bytes) -> dict[str, float]:
    """Every sample, as `name{labels sorted}`."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found, f"{key} twice: that voids the scrape"
            found[key] = sample.value
    return found


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    return gone.pid


# -- what becomes of a run -----------------------------------------------------------------------------------


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
    expected = series(render(lasting(families(live.view()))))
    served = series(render(lasting(families(member.summary.view()))))
    # A summary has an end, and nobody's health; all else is equal, nonfinite elements and histograms included.
    ours = {"gradwatch_run_end_timestamp_seconds{}", "gradwatch_run_outcome{outcome=finished}"}
    assert served.keys() - expected.keys() == ours
    assert {name: value for name, value in expected.items() if served.get(name) != pytest.approx(value)} == {}


@pytest.mark.parametrize(
    ("last", "close", "outcome"),
    [(None, True, "finished"), (Decision(stop=True), True, "stopped"), (None, False, "died")],
)
def test_how_it_ended(
    last: Decision | None, close: bool, outcome: str, tmp_path: Path, dead_pid: int
) -> None:
    """Closed in order, stopped by a rule, or killed."""
    record_run(a_run(tmp_path, pid=dead_pid), history(last=last), close)
    fleet = scan(tmp_path)
    assert [member.state for member in fleet.members] == [outcome]
    text = metrics(fleet, 60).body.decode()
    assert f'outcome="{outcome}"' in text
    assert 'gradwatch_steps_total{job="gradwatch",run_id="run-1",rank="0",instance="run-1/0"} 20' in text
    assert "gradwatch_last_step_timestamp_seconds" not in text
    assert fleet_page(fleet, time.time()).body.count(b"<tr>") == 2


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


def test_an_open_endpoint_of_another_machine(tmp_path: Path) -> None:
    """Its processes cannot be seen: a target by its machine's name, or by the name Prometheus needs."""
    (tmp_path / "far").mkdir()
    says = {"host": "0.0.0.0", "port": 29440, "pid": 1, "run_id": "far", "rank": 3, "attempt": 0}
    path = tmp_path / "far" / "endpoint-rank3.json"
    path.write_text(json.dumps({**says, "node": "node-9"}))
    fleet = scan(tmp_path)
    assert json.loads(sd(fleet).body)[0]["targets"] == ["node-9:29440"]
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


# -- what lies in folders ------------------------------------------------------------------------------------

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
    summarise = sys.modules["gradwatch.serve.summary"].summarise
    monkeypatch.setattr(
        "gradwatch.serve.summary.summarise", lambda process: read.append(process) or summarise(process)
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
    """3,000 runs: found once; the next look neither reads nor lists them again, and a new one is found."""
    record_run(a_run(tmp_path / "one", pid=dead_pid), history())
    journal = (tmp_path / "one" / "run-1" / "rank0-attempt0.gwj").read_bytes()
    for number in range(3000):
        folder = tmp_path / "runs" / f"run-{number}"
        folder.mkdir(parents=True)
        (folder / "rank0-attempt0.gwj").write_bytes(journal)
    scanner = Scanner([tmp_path / "runs"], Summaries(""))
    scanner.scan()
    assert len(scanner._settled) == 3000
    listed: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gradwatch.serve.fleet.processes", lambda folder: listed.append(folder) or processes(folder)
        )
        assert len(scanner.scan().members) == 1  # all of them say they are run-1
        assert listed == []
        record_run(a_run(tmp_path / "runs", "new", pid=dead_pid), history())
        assert {member.run_id for member in scanner.scan().members} == {"run-1", "new"}
        assert listed == [tmp_path / "runs" / "new"]
        shutil.rmtree(tmp_path / "runs" / "new")
        assert {member.run_id for member in scanner.scan().members} == {"run-1"}


# -- the server ----------------------------------------------------------------------------------------------


@contextmanager
def served(*roots: Path, **options: Any) -> Iterator[str]:
    server = Server(Scanner(roots, Summaries("")), Address("127.0.0.1", 0), 0.1, **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield f"http://{server.address}"
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def fetch(url: str) -> tuple[int, str, str]:
    for _ in range(100):
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status, response.headers["Content-Type"], response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, "", error.read().decode()
        except urllib.error.URLError:
            time.sleep(0.05)  # it listens after its first look
    raise AssertionError(f"nobody answers at {url}")


def test_every_page_answers_with_its_type(tmp_path: Path, dead_pid: int) -> None:
    """Prometheus insists on application/json for http_sd."""
    record_run(a_run(tmp_path, pid=dead_pid), history())
    with served(tmp_path) as url:
        assert fetch(f"{url}/healthz")[::2] == (200, "ok\n")
        assert fetch(f"{url}/sd") == (200, "application/json", "[]\n")
        assert json.loads(fetch(f"{url}/runs.json")[2])[0]["state"] == "finished"
        assert fetch(f"{url}/")[1].startswith("text/html")
        assert "gradwatch_run_outcome" in fetch(f"{url}/metrics")[2]
        assert fetch(f"{url}/nothing")[0] == 404
        for book in (Path(__file__).resolve().parents[2] / "deploy" / "runbooks").glob("*.md"):
            status, _, page = fetch(f"{url}/runbooks/{book.stem}")
            assert status == 200
            assert "What to do" in page
            assert book.stem in fetch(f"{url}/runbooks")[2]


def test_a_server_that_no_longer_looks_is_not_healthy(tmp_path: Path) -> None:
    """The pages stay; /healthz says it."""
    server = Server(Scanner([tmp_path], Summaries("")), Address("127.0.0.1", 0))
    server._look()
    route = server._routes()["/healthz"]
    assert route(False).body == b"ok\n"
    server._fleet = Fleet((), time.time() - 1000, 0.0)
    with pytest.raises(RequestError, match="last looked at"):
        route(False)
    server.close()


def test_a_scan_that_fails_keeps_the_last_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, said once, and the next scan is made."""
    said: list[BaseException] = []
    server = Server(Scanner([tmp_path], Summaries("")), Address("127.0.0.1", 0), on_error=said.append)
    server._look()
    before = server._answers
    monkeypatch.setattr(Scanner, "scan", lambda self: 1 / 0)
    server._look()
    assert server._answers is before
    assert [type(error) for error in said] == [ZeroDivisionError]
    assert server.scanner.errors == 1
    server.close()


def test_the_command_serves_without_torch_and_ends_at_sigterm(tmp_path: Path, dead_pid: int) -> None:
    """As systemd runs it: no torch, an address on stderr, exit 0 within a moment of SIGTERM, files untouched."""
    record_run(a_run(tmp_path / "runs", pid=dead_pid), history())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gradwatch.cli import main\n"
        f"sys.exit(main(['serve', '--dir', {str(tmp_path / 'runs')!r}, '--listen', '127.0.0.1:0',"
        f" '--state', {str(tmp_path / 'state')!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = line.split(" at ")[1].strip()
        assert "gradwatch_steps_total" in fetch(f"{url}metrics")[2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_lists_of_targets_are_tidied(tmp_path: Path, dead_pid: int) -> None:
    """What a killed process left on a file_sd list is marked, and would go in a quarter of an hour."""
    run = make_run(tmp_path, host=platform.node())
    path = Path(write_target(str(tmp_path / "targets"), run, Address("127.0.0.1", 29440)))
    path.write_text(path.read_text().replace(f'pid": "{os.getpid()}"', f'pid": "{dead_pid}"'))
    server = Server(
        Scanner([tmp_path], Summaries("")), Address("127.0.0.1", 0), lists=[str(tmp_path / "targets")]
    )
    server._look()
    server.close()
    assert "dead_since" in path.read_text()


def test_a_taken_port_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another port would be found by nobody."""
    with served(tmp_path) as url:
        where = url.removeprefix("http://")
        assert main(["serve", "--dir", str(tmp_path), "--listen", where]) == 2
    assert "is taken" in capsys.readouterr().err


def test_once(tmp_path: Path, dead_pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts: all runs as JSON, and done."""
    record_run(a_run(tmp_path, pid=dead_pid), history())
    assert main(["serve", "--dir", str(tmp_path), "--state", str(tmp_path / "state"), "--once"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["run_id"], run["state"], run["steps"], run["recent"]) == (
        "run-1",
        "finished",
        20,
        ["step 2: non-finite (critical)"],
    )
