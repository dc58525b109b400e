"""Ways out that need no Prometheus to reach the process: straight to Alertmanager, by file, by Pushgateway."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwatch.account import Account
from gradwatch.errors import AttachError
from gradwatch.records.decision import Decision
from gradwatch.records.record import Record
from gradwatch.runtime.background_worker import THREAD_NAME, background_worker
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks import make_sink
from gradwatch.sinks.alertmanager import AlertmanagerSink
from gradwatch.sinks.prometheus.pushgateway import PushgatewaySink
from gradwatch.sinks.prometheus.textfile import TextfileSink
from tests.deploy.jobs import job
from tests.deploy.servers import Inbox, alertmanager, running, wait_until, webhook
from tests.support.binaries import require
from tests.support.ports import free_port
from tests.support.sink_records import make_event, make_record, make_run, make_sites

SITES = make_sites(4)
DIRECT = """
version: 1
extends: [default]
sinks:
  - journal
  - log
  - alertmanager: {url: "http://127.0.0.1:PORT", hold_seconds: 2, runbooks: "http://127.0.0.1:29439/runbooks"}
"""
STOP = "rules: {non-finite: {do: [stop]}}\n"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Inbox, int]]:
    """A real Alertmanager and who is told by it."""
    with webhook() as inbox, alertmanager(tmp_path_factory.mktemp("alertmanager"), inbox) as port:
        yield inbox, port


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def alerts_of(port: int, run_id: str) -> list[dict[str, Any]]:
    """What Alertmanager knows of a run."""
    found = json.loads(get(f"http://127.0.0.1:{port}/api/v2/alerts?filter=run_id%3D%22{run_id}%22"))
    return list(found)


def firing(step: int = 0, **fields: Any) -> Record:
    event = make_event(step=step, sites=("layers.3.weight",), count=1, summary="Not finite.", **fields)
    return make_record(SITES, step=step, events=(event,))


def resolved(step: int) -> Record:
    return make_record(SITES, step=step, events=(make_event("resolved", step=step),))


def workers() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_a_nan_reaches_the_webhook_without_any_prometheus(told: tuple[Inbox, int], tmp_path: Path) -> None:
    """The same show as with Prometheus, by the direct path: rule, run, severity, parameter; then resolved."""
    inbox, port = told
    rules = tmp_path / "direct.gradwatch.yaml"
    rules.write_text(DIRECT.replace("PORT", str(port)))
    with job(tmp_path / "job", "direct-nan", rules) as one:
        journal = tmp_path / "runs" / "direct-nan" / "rank0-attempt0.gwj"
        wait_until(journal.exists, "the job is watched")
        one.tell("poison")
        began = time.monotonic()
        alert = inbox.wait_for("firing", run_id="direct-nan", rule="non-finite")
        heard = time.monotonic() - began
        inbox.wait_for("resolved", run_id="direct-nan", rule="non-finite")
        print(f"told after {heard:.2f} s, resolved after {time.monotonic() - began:.2f} s")  # pytest -s
        one.end()
    labels = alert["labels"]
    assert labels["alertname"] == "GradwatchNonFiniteGradients"
    assert (labels["severity"], labels["rank"], labels["via"]) == ("critical", "0", "direct")
    notes = alert["annotations"]
    assert re.search(r"\b0\.weight\b", notes["sites"])
    assert "skip_step" in notes["actions"]
    assert notes["runbook_url"] == "http://127.0.0.1:29439/runbooks/GradwatchNonFiniteGradients"
    assert notes["journal"] == str(tmp_path / "runs" / "direct-nan")


def test_stop_posts_its_alert_before_the_process_ends(told: tuple[Inbox, int], tmp_path: Path) -> None:
    """The process is gone, Alertmanager has the alert, and closing has not resolved it."""
    _, port = told
    rules = tmp_path / "stop.gradwatch.yaml"
    rules.write_text(DIRECT.replace("PORT", str(port)) + STOP)
    with job(tmp_path / "job", "direct-stop", rules) as one:
        one.tell("poison")
        status, _, err = one.ended()
        assert "TrainingStopped" in err
        assert status != 0
        (alert,) = [each for each in alerts_of(port, "direct-stop") if each["labels"]["rule"] == "non-finite"]
    assert alert["status"]["state"] == "active"
    assert alert["annotations"]["actions"] == "stop"


def test_an_alert_keeps_its_start_and_outlives_a_short_firing(
    told: tuple[Inbox, int], tmp_path: Path
) -> None:
    """Over within a step, it still lasts as long as Alertmanager needs to tell anybody; no end before a start."""
    _, port = told
    sink = AlertmanagerSink(f"http://127.0.0.1:{port}", hold_seconds=30)
    health = Health()
    sink.open(make_run(tmp_path), health)
    sink.write(firing(0))
    assert sink.flush(10)
    (first,) = alerts_of(port, "run-1")
    sink.write(firing(1))
    sink.write(resolved(2))
    assert sink.flush(10)
    (second,) = alerts_of(port, "run-1")
    sink.close()
    assert second["startsAt"] == first["startsAt"]
    assert first["startsAt"] < second["endsAt"] < first["endsAt"]
    assert second["status"]["state"] == "active"
    assert health.errors() == {}
    wait_until(lambda: workers() == 0, "the thread ends with its last round")


def test_a_second_process_of_a_rank_has_alerts_of_its_own(told: tuple[Inbox, int], tmp_path: Path) -> None:
    """The same rule fires in both: two alerts, and the end of one resolves no other."""
    _, port = told
    sinks = [AlertmanagerSink(f"http://127.0.0.1:{port}") for _ in range(2)]
    for place, sink in enumerate(sinks):
        sink.open(make_run(tmp_path, rank=8, place=place), Health())
        sink.write(firing())
        assert sink.flush(10)
    found = [each["labels"] for each in alerts_of(port, "run-1") if each["labels"]["rank"] == "8"]
    assert sorted((each["instance"], each.get("process")) for each in found) == [
        ("run-1/8", None),
        ("run-1/8/1", "1"),
    ]
    for sink in sinks:
        sink.close()


def test_a_refiring_that_must_not_notify_does_not(told: tuple[Inbox, int], tmp_path: Path) -> None:
    """`notify` False: within a rule's cooldown nobody is told again."""
    _, port = told
    sink = AlertmanagerSink(f"http://127.0.0.1:{port}")
    sink.open(make_run(tmp_path, rank=7), Health())
    sink.write(firing(0, notify=False))
    assert sink.flush(10)
    sink.close()
    assert not [each for each in alerts_of(port, "run-1") if each["labels"]["rank"] == "7"]


def test_a_server_that_comes_back_is_told_what_it_missed(tmp_path: Path) -> None:
    """Down at first: counted, marked as down, training waits for nothing; then the alert arrives by itself."""
    require("prometheus-alertmanager")  # before a sink is open that a skipped test would leave behind
    with webhook() as inbox:
        port, health = free_port(), Health()
        sink = AlertmanagerSink(f"http://127.0.0.1:{port}")
        sink.open(make_run(tmp_path), health)
        sink.write(firing())
        assert not sink.flush(5)
        assert health.errors()["alertmanager"] >= 1
        assert health.up()["alertmanager"] is False
        (tmp_path / "server").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.deploy.servers.free_port", lambda: port)
            with alertmanager(tmp_path / "server", inbox):
                inbox.wait_for("firing", rule="non-finite")
                wait_until(lambda: health.up()["alertmanager"], "it is up again")
                sink.close()


def test_a_server_that_never_answers_delays_no_step_and_the_exit_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody accepts: neither `write` nor `close` waits for the end of a request; the fault is counted."""
    monkeypatch.setattr("gradwatch.sinks.http_post.TIMEOUT_SECONDS", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        health = Health()
        sink = AlertmanagerSink(f"http://127.0.0.1:{silent.getsockname()[1]}")
        sink.open(make_run(tmp_path), health)
        for step in range(1000):
            sink.write(firing(step))
        sink.close()
        assert workers() == 1, "the request is still under way"
        assert health.errors()["alertmanager"] >= 1
    wait_until(lambda: workers() == 0, "the thread ends with its last request")


def test_a_forked_child_neither_hangs_nor_sends(told: tuple[Inbox, int], tmp_path: Path) -> None:
    """In a child the sink is inert, whatever lock was held at the fork; the parent goes on."""
    _, port = told
    sink = AlertmanagerSink(f"http://127.0.0.1:{port}")
    sink.open(make_run(tmp_path, rank=5), Health())
    for step in range(20):
        sink.write(firing(step))
        child = os.fork()
        if not child:
            sink.flush(1)
            sink.close()
            os._exit(3 if background_worker()._thread is not None else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sink.flush(10)
    assert [each for each in alerts_of(port, "run-1") if each["labels"]["rank"] == "5"]
    sink.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "127.0.0.1:9093"}, "is not a URL"),
        ({"url": "ftp://host"}, "is not a URL"),
        ({"url": "http://me:secret@host"}, "no user or password"),
        ({"url": "ftp://me:secret@host"}, "no user or password"),
        ({"url": "me:secret@host:9093"}, "no user or password"),
        ({"url": "http://me:sec/ret@host"}, "no user or password"),
        ({"url": "http://me:secret@[host"}, "no user or password"),
        ({"url": "http://me:secret@h\u2100st"}, "no user or password"),
        ({"url": "http://[host"}, "is not a URL"),
        ({"runbooks": "http://me:secret@host"}, "no user or password"),
        ({"renew_seconds": 0}, "renew_seconds"),
        ({"hold_seconds": -1}, "hold_seconds"),
    ],
)
def test_what_is_wrong_is_said_before_training(options: dict[str, Any], says: str) -> None:
    """And a password is not repeated."""
    with pytest.raises(AttachError, match=says) as refused:
        make_sink("alertmanager", options)
    assert "secret" not in str(refused.value)
    assert "ret@" not in str(refused.value)


def test_a_token_is_sent_and_read_anew(tmp_path: Path) -> None:
    """The bearer token comes from a file, which may change while the job runs."""
    heard: list[str] = []
    token = tmp_path / "token"
    token.write_text("first\n")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                peer, _ = server.accept()
                with peer:
                    heard.append(peer.recv(65536).decode())
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        sink = AlertmanagerSink(f"http://127.0.0.1:{server.getsockname()[1]}", token_file=str(token))
        sink.open(make_run(tmp_path), Health())
        sink.write(firing())
        assert sink.flush(10)
        token.write_text("second\n")
        sink.close()
        thread.join(60)
    assert "Authorization: Bearer first\r\n" in heard[0]
    assert "Authorization: Bearer second\r\n" in heard[1]


# -- files and Pushgateway -----------------------------------------------------------------------------------


def test_node_exporter_serves_the_file_of_a_run(tmp_path: Path) -> None:
    """A real node_exporter reads it: every series says which run, rank and process; a clean exit takes it away."""
    folder = tmp_path / "textfiles"
    folder.mkdir()
    port = free_port()
    command = [
        require("prometheus-node-exporter"),
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={folder}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, tmp_path / "log"):
        health = Health()
        sinks = [TextfileSink(str(folder)) for _ in range(3)]
        for sink, of in zip(sinks, ({}, {"rank": 1}, {"place": 1}), strict=True):
            sink.open(make_run(tmp_path, **of), health)
            sink.write(make_record(SITES))
            assert sink.flush(10)
        body = wait_until(lambda: get(f"http://127.0.0.1:{port}/metrics"), "node_exporter")
        assert 'gradwatch_steps_total{rank="0",run_id="run-1"} 1' in body
        assert 'gradwatch_steps_total{rank="1",run_id="run-1"} 1' in body
        assert 'gradwatch_steps_total{process="1",rank="0",run_id="run-1"} 1' in body
        assert "node_textfile_scrape_error 0" in body
        for sink in sinks:
            sink.close()
        assert list(folder.iterdir()) == []
        assert health.errors() == {}
    wait_until(lambda: workers() == 0, "the thread ends with its last round")


def test_a_folder_that_is_not_there_costs_only_the_file(tmp_path: Path) -> None:
    """Counted as "textfile"; training goes on."""
    health = Health()
    sink = TextfileSink(str(tmp_path / "nowhere"))
    sink.open(make_run(tmp_path), health)
    sink.write(make_record(SITES))
    assert not sink.flush(5)
    sink.close()
    assert health.errors()["textfile"] >= 1


def test_files_of_the_dead_do_not_stay_for_ever(tmp_path: Path) -> None:
    """A file nobody has written for a day goes with the next run; others' files stay."""
    old, other = tmp_path / "gradwatch-dead-rank0.prom", tmp_path / "raid.prom"
    for path in (old, other):
        path.touch()
        os.utime(path, (1, 1))
    sink = TextfileSink(str(tmp_path))
    sink.open(make_run(tmp_path), Health())
    assert sink.flush(5)
    sink.close()
    assert not old.exists()
    assert other.exists()


def test_a_pushgateway_keeps_the_outcome_and_nothing_that_was_only_true_then(tmp_path: Path) -> None:
    """A real Pushgateway: counters and how it ended; a new attempt of the same run takes the old outcome away."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [require("prometheus-pushgateway"), f"--web.listen-address=127.0.0.1:{port}"]
    with running(command, tmp_path / "log"):
        wait_until(lambda: get(f"{url}/-/ready"), "Pushgateway")
        health = Health()
        sink = PushgatewaySink(url)
        sink.open(make_run(tmp_path), health)
        sink.write(firing())
        stop = Decision(stop=True)
        sink.write(make_record(SITES, step=1, decision=stop))
        sink.close()
        body = get(f"{url}/metrics")
        where = 'instance="",job="gradwatch",'
        assert f'gradwatch_steps_total{{{where}rank="0",run_id="run-1"}} 2' in body
        assert re.search(r'gradwatch_run_outcome\{.*outcome="stopped".*run_id="run-1"\} 1', body)
        assert re.search(r'gradwatch_rule_firings_total\{.*rule="non-finite".*\} 1', body)
        assert "gradwatch_grad_norm{" not in body
        assert "gradwatch_last_step_timestamp_seconds" not in body
        second = PushgatewaySink(url)
        second.open(make_run(tmp_path, place=1), health)
        second.close()
        assert f'gradwatch_steps_total{{{where}process="1",rank="0",run_id="run-1"}} 0' in get(
            f"{url}/metrics"
        )
        assert f'gradwatch_steps_total{{{where}rank="0",run_id="run-1"}} 2' in get(f"{url}/metrics")
        again = PushgatewaySink(url)
        again.open(make_run(tmp_path), health)
        wait_until(
            lambda: f'steps_total{{{where}rank="0"' not in get(f"{url}/metrics"), "the old outcome is gone"
        )
        again.close()
        assert 'gradwatch_run_outcome{instance="",job="gradwatch",outcome="finished"' in get(f"{url}/metrics")
        crashed = PushgatewaySink(url)
        crashed.open(make_run(tmp_path), health)
        crashed.conclude(Account(ended="failed"))
        crashed.close()
        assert 'gradwatch_run_outcome{instance="",job="gradwatch",outcome="failed"' in get(f"{url}/metrics")
        assert health.errors() == {}
    wait_until(lambda: workers() == 0, "the thread ends with its last round")
