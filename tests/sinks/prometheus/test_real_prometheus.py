"""A real Prometheus server scrapes a real endpoint, and a query finds what happened."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np

from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.support import warm
from tests.support.binaries import require
from tests.support.real_prometheus import prometheus
from tests.support.sink_records import make_event, make_record, make_sites, serving, skip


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


SCRIPT = """
import pathlib, sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
folder = pathlib.Path(sys.argv[1])
step = 0
while not (folder / "enough").exists() and step < 3000:
    x = torch.randn(16, 8)
    if (folder / "poison").exists():
        (folder / "poison").unlink()
        x[3, 2] = float("nan")
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    step += 1
    time.sleep(0.02)
assert all(parameter.isfinite().all() for parameter in model.parameters())
"""


def test_an_unmodified_script_under_a_real_prometheus(tmp_path: Path) -> None:
    """The main job, whole: `gradwatch run` in front of a script, a NaN batch, a scrape, a query that finds it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "gradwatch", "run", "--dir", str(tmp_path / "runs"), "--run-id", "job"]
    command = [
        *run,
        "--listen",
        "127.0.0.1:0",
        "--",
        sys.executable,
        str(tmp_path / "train.py"),
        str(tmp_path),
    ]
    job = warm.Process(command)
    try:
        endpoint = tmp_path / "runs" / "job" / "endpoint-rank0.json"
        deadline = time.monotonic() + 250
        while not endpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        url = str(json.loads(endpoint.read_text(encoding="utf-8"))["url"])
        with prometheus(tmp_path, url.removeprefix("http://").removesuffix("/metrics")) as server:
            server.wait_for("gradwatch_steps_total > 5")
            server.wait_for("gradwatch_nonfinite_steps_total == 0")
            (tmp_path / "poison").touch()
            server.wait_for("gradwatch_nonfinite_steps_total == 1")
            server.wait_for("gradwatch_skipped_steps_total == 1")
            assert server.query('gradwatch_rule_firings_total{rule="non-finite"}')[0][1] == 1
            assert server.query("gradwatch_internal_errors_total > 0") == []
            body = urllib.request.urlopen(url, timeout=60).read().decode()
            checked = subprocess.run(
                [require("promtool"), "check", "metrics"],
                input=body,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    finally:
        (tmp_path / "enough").touch()
        status, out, err = job.communicate(60)
    assert (status, out) == (0, ""), err
    assert "non-finite" in err  # one line for the person at the terminal
