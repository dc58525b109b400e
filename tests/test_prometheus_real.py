"""A real Prometheus server scrapes a real endpoint, and a query finds what happened."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.sinks.prometheus import PrometheusSink
from tests.binaries import require
from tests.sink_records import make_event, make_record, make_sites, serving, skip

CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}
scrape_configs:
  - job_name: gradwatch
    static_configs: [{{targets: ['{target}'], labels: {{run_id: run-1, rank: '0'}}}}]
"""


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.root}{path}", timeout=5) as response:
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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait()


def train(sink: PrometheusSink, first: int, steps: int, broken: bool = False) -> None:
    """A few steps; a broken one has a NaN in `layers.3.weight`, and the rule skips it."""
    sites = make_sites(names=[*(f"layers.{i}.weight" for i in range(8)), 'odd"\\\n\x1b[1m\ud800'])
    for step in range(first, first + steps):
        norm = np.linspace(0.1, 1, len(sites)).astype(np.float32)
        if broken:
            norm[3] = np.nan
        event = make_event(step=step, sites=("layers.3.weight",), count=1, first_cause="layers.3.weight")
        sink.write(
            make_record(
                sites,
                norm,
                step=step,
                events=(event,) if broken else (),
                firing=["non-finite"] if broken else [],
                decision=skip() if broken else None,
                wall_time=time.time(),
            )
        )


def test_a_real_prometheus_finds_the_nan(tmp_path: Path) -> None:
    """Scraped before and after; the counters tell, where every comparison with the NaN itself stays empty."""
    with serving(tmp_path, params="all") as sink:
        assert sink.url is not None
        target = sink.url.removeprefix("http://").removesuffix("/metrics")
        with prometheus(tmp_path, target) as server:
            train(sink, 0, 10)
            server.wait_for("gradwatch_steps_total == 10")
            server.wait_for("gradwatch_nonfinite_steps_total == 0")
            assert len(server.query("gradwatch_param_grad_norm")) == 9
            train(sink, 10, 1, broken=True)

            ((labels, count),) = server.wait_for("gradwatch_nonfinite_steps_total > 0")
            assert count == 1
            assert (labels["run_id"], labels["rank"]) == ("run-1", "0")
            server.wait_for(
                'increase(gradwatch_rule_firings_total{kind="nonfinite",severity="critical"}[1m]) > 0'
            )
            assert server.query('gradwatch_actions_total{action="skip_step"}')[0][1] == 1
            assert server.query('gradwatch_rule_active{rule="non-finite"}')[0][1] == 1
            ((where, _),) = server.query("gradwatch_param_grad_norm != gradwatch_param_grad_norm")
            assert (where["param"], where["group"]) == ("layers.3.weight", "embed")
            assert server.query("gradwatch_grad_norm > 0 or gradwatch_grad_norm <= 0") == []
            assert server.query("histogram_quantile(0.5, gradwatch_step_grad_norm_bucket) > 0")
            assert server.query("up")[0][1] == 1

            kept = server.get("/api/v1/targets")["data"]["activeTargets"][0]
            assert kept["lastError"] == ""
            metadata = server.get("/api/v1/metadata")["data"]
            assert metadata["gradwatch_nonfinite_steps_total"][0]["type"] == "counter"
            assert metadata["gradwatch_step_grad_norm"][0]["type"] == "histogram"
