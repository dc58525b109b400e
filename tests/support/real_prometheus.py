"""A real Prometheus server for tests, scraping one target five times a second."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.binaries import require
from tests.support.ports import free_port

CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}
scrape_configs:
  - job_name: gradwatch
    static_configs: [{{targets: ['{target}'], labels: {{run_id: run-1, rank: '0'}}}}]
"""
AT_ONCE = "--scrape.discovery-reload-interval=100ms"
"""Targets that were found are scraped; by default after up to five seconds."""


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.root}{path}", timeout=60) as response:
            return json.load(response)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        found = self.get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return [(each["metric"], float(each["value"][1])) for each in found["data"]["result"]]

    def wait_for(self, expression: str, seconds: float = 20.0) -> list[tuple[dict[str, str], float]]:
        """The first non-empty answer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if found := self.query(expression):
                    return found
            except (urllib.error.URLError, ConnectionError):
                pass  # not up yet
            time.sleep(0.1)
        raise AssertionError(
            f"nothing for {expression} within {seconds} s; targets: {self.get('/api/v1/targets')}"
        )


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """A server of our own that scrapes `target` five times a second."""
    program = require("prometheus")
    (folder / "prometheus.yml").write_text(CONFIG.format(target=target))
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                AT_ONCE,
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait()
