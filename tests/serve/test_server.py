"""`gradwatch serve` as a server and as a command: what it answers, when it is healthy, how it ends."""

from __future__ import annotations

import json
import os
import platform
import re
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

import pytest

from gradwatch.cli import main
from gradwatch.endpoint.address import Address
from gradwatch.endpoint.http_protocol import RequestError
from gradwatch.serve import Server
from gradwatch.serve.ended_run_counters import Summaries
from gradwatch.serve.run_scanner import Scanner
from gradwatch.sinks.prometheus.file_sd import write_target
from tests.deploy.run_folders import a_run, history, record_run
from tests.deploy.servers import wait_until
from tests.support.sink_records import make_run


@contextmanager
def served(*roots: Path, **options: Any) -> Iterator[str]:
    server = Server(Scanner(roots, Summaries("")), Address("127.0.0.1", 0), 0.1, **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield f"http://{server.address}"
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


def fetch(url: str) -> tuple[int, str, str]:
    for _ in range(100):
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
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
        wait_until(lambda: fetch(f"{url}/sd")[0] == 200, "the first look is over")
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


def test_each_run_has_its_report(tmp_path: Path, dead_pid: int) -> None:
    """Linked from the list, where its incidents are; a name that is none is not found."""
    record_run(a_run(tmp_path, "one two", pid=dead_pid), history())
    with served(tmp_path) as url:
        wait_until(lambda: fetch(f"{url}/sd")[0] == 200, "the first look is over")
        listed = fetch(f"{url}/")[2]
        assert '<a href="/run/one%20two">one two</a>' in listed
        assert '<a href="/run/one%20two#incidents">' in listed
        assert fetch(f"{url}/run/one")[0] == 404
        assert wait_until(lambda: "report, read at" in fetch(f"{url}/run/one%20two")[2], "the report is made")


def test_a_server_that_no_longer_looks_is_not_healthy(tmp_path: Path) -> None:
    """The pages stay; /healthz says it."""
    server = Server(Scanner([tmp_path], Summaries("")), Address("127.0.0.1", 0))
    server._scan()
    route = server._routes()["/healthz"]
    assert route(False).body == b"ok\n"
    server._health._alive -= 1000
    with pytest.raises(RequestError, match="No run folder could be read"):
        route(False)
    server.close()


def test_it_is_healthy_while_it_looks_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of journals take minutes; nobody may restart it for that, or it would never be done."""
    go, scan = threading.Event(), Scanner.scan
    monkeypatch.setattr(Scanner, "scan", lambda self: go.wait(30) and scan(self))
    with served(tmp_path) as url:
        assert fetch(f"{url}/healthz")[0] == 200
        assert fetch(f"{url}/sd")[0] == 503
        status, kind, page = fetch(f"{url}/")
        assert (status, kind.partition(";")[0]) == (200, "text/html")
        assert "for the first time" in page
        go.set()
        assert wait_until(lambda: fetch(f"{url}/sd")[0] == 200, "the first look is over")


def test_the_first_look_says_how_far_it_is(tmp_path: Path, dead_pid: int) -> None:
    """On the page, and in what a scrape is refused with."""
    for number in range(3):
        record_run(a_run(tmp_path, f"run-{number}", pid=dead_pid), history())
    server = Server(Scanner([tmp_path], Summaries("")), Address("127.0.0.1", 0))
    said: list[str] = []
    server._outer_progress = lambda done, total: said.append(server._routes()["/"](False).body.decode())
    server._scan()
    assert [re.findall(r"\d+ of \d+", page) for page in said] == [["1 of 3"], ["2 of 3"], ["3 of 3"]]
    server.close()


def test_a_scan_that_fails_keeps_the_last_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, said once, and the next scan is made."""
    said: list[BaseException] = []
    server = Server(Scanner([tmp_path], Summaries("")), Address("127.0.0.1", 0), on_error=said.append)
    server._scan()
    before = server._answers
    monkeypatch.setattr(Scanner, "scan", lambda self: 1 / 0)
    server._scan()
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
        wait_until(lambda: "gradwatch_steps_total" in fetch(f"{url}metrics")[2], "the first look is over")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_lists_of_targets_are_tidied(tmp_path: Path, dead_pid: int) -> None:
    """What a killed process left on a file_sd list is marked, and would go in a quarter of an hour."""
    run = make_run(tmp_path, host=platform.node())
    path = Path(write_target(str(tmp_path / "targets"), run, Address("127.0.0.1", 29440)))
    path.write_text(
        path.read_text(encoding="utf-8").replace(f'pid": "{os.getpid()}"', f'pid": "{dead_pid}"'),
        encoding="utf-8",
    )
    server = Server(
        Scanner([tmp_path], Summaries("")), Address("127.0.0.1", 0), lists=[str(tmp_path / "targets")]
    )
    server._scan()
    server.close()
    assert "dead_since" in path.read_text(encoding="utf-8")


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
