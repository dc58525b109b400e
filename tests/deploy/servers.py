"""Real servers on loopback for the shows: Prometheus and Alertmanager as `gradwatch deploy export` sets them up."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gradwatch.cli import main
from tests.support.binaries import require
from tests.support.ports import free_port
from tests.support.real_prometheus import AT_ONCE, Prometheus

PATIENCE_SECONDS = 90.0
"""On a busy machine; what a show takes on a quiet one stands in deploy/README.md."""


def wait_until(found: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """The first truthy answer; not yet being able to answer counts as none."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if answer := found():
                return answer
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass  # not up yet
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


@dataclass
class Inbox:
    """What a local webhook was told, in order; each alert with its group's status."""

    port: int
    alerts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def matching(self, status: str, **labels: str) -> list[dict[str, Any]]:
        """The alerts of that status (firing, resolved) with at least these labels."""
        return [
            each
            for each in list(self.alerts)
            if each["status"] == status and labels.items() <= each["labels"].items()
        ]

    def wait_for(self, status: str, **labels: str) -> dict[str, Any]:
        """The first alert of that status with these labels."""
        try:
            found: list[dict[str, Any]] = wait_until(
                lambda: self.matching(status, **labels), f"{status} {labels}"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}; told: {self.alerts}") from None
        return found[0]


@contextmanager
def webhook() -> Iterator[Inbox]:
    """A receiver on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            inbox.alerts.extend(body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not onto pytest's stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        inbox = Inbox(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield inbox
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def running(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server of our own, gone at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def alertmanager(folder: Path, inbox: Inbox) -> Iterator[int]:
    """The shipped configuration, in a hurry and with a receiver; yields its port."""
    port = free_port()
    shipped = (Path(__file__).resolve().parents[2] / "deploy/alertmanager/alertmanager.yml").read_text(
        encoding="utf-8"
    )
    hurried = shipped.replace("group_wait: 10s", "group_wait: 0s").replace(
        "group_interval: 1m", "group_interval: 1s"
    )
    receiver = f"  - name: nobody\n    webhook_configs: [{{url: '{inbox.url}', send_resolved: true}}]\n"
    (folder / "alertmanager.yml").write_text(hurried.replace("  - name: nobody\n", receiver))
    command = [
        require("prometheus-alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with running(command, folder / "alertmanager.log"):
        wait_until(lambda: _get(f"http://127.0.0.1:{port}/-/ready"), "Alertmanager")
        yield port


@dataclass(frozen=True)
class Stack:
    """Prometheus, Alertmanager and an inbox that talk to each other; jobs put themselves into `targets`."""

    prometheus: Prometheus
    inbox: Inbox
    targets: Path
    alertmanager_port: int
    serve_port: int

    def up(self, run_id: str) -> list[str]:
        """The ranks of a run that answered the last scrape."""
        return sorted(labels["rank"] for labels, _ in self.prometheus.query(f'up{{run_id="{run_id}"}} == 1'))

    def active_targets(self, run_id: str) -> list[dict[str, Any]]:
        """What Prometheus scrapes at present for a run."""
        targets = self.prometheus.get("/api/v1/targets?state=active")["data"]["activeTargets"]
        return [each for each in targets if each["labels"].get("run_id") == run_id]


@contextmanager
def stack(folder: Path, rules: str) -> Iterator[Stack]:
    """The exported stack at one scrape a second, made from a rule file."""
    program = require("prometheus")
    port, serve_port = free_port(), free_port()
    targets = folder / "targets"
    targets.mkdir()
    with ExitStack() as servers:
        inbox = servers.enter_context(webhook())
        alert_port = servers.enter_context(alertmanager(folder, inbox))
        places = ["--alertmanager", f"127.0.0.1:{alert_port}", "--serve", f"127.0.0.1:{serve_port}"]
        hurry = ["--scrape-interval", "1", "--targets", f"{targets}/*.json"]
        assert main(["deploy", "export", str(folder / "stack"), "--rules", rules, *places, *hurry]) == 0
        command = [
            program,
            f"--config.file={folder / 'stack/prometheus/prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            AT_ONCE,
        ]
        servers.enter_context(running(command, folder / "prometheus.log"))
        wait_until(lambda: _get(f"http://127.0.0.1:{port}/-/ready"), "Prometheus")
        yield Stack(Prometheus(port), inbox, targets, alert_port, serve_port)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return bytes(response.read()) or b"empty"
