"""The dashboards: made by Grafana's SDK, laid out on its grid, and every query answered by a real Prometheus."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.deploy.run_folders import a_run, history, record_run
from tests.deploy.servers import Stack, running, stack, wait_until
from tests.support.sink_records import make_event, make_record, make_run, make_sites, skip

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARDS = ("run", "fleet")
KNOWN = {"$__rate_interval": "10s", "$__interval": "5s", "$__range": "60s"}


def board(name: str) -> dict[str, Any]:
    return dict(json.loads((DEPLOY / "grafana" / "dashboards" / f"{name}.json").read_text(encoding="utf-8")))


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    """What is committed is what the SDK writes."""
    command = [sys.executable, str(DEPLOY / "grafana" / "generate.py"), str(tmp_path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    committed = DEPLOY / "grafana" / "dashboards"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in committed.iterdir()
    )
    for path in tmp_path.iterdir():
        assert (committed / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), (
            "run deploy/grafana/generate.py"
        )


@pytest.mark.parametrize("name", BOARDS)
def test_the_grid(name: str) -> None:
    """No panel runs past column 24, none covers another, no two have the same number."""
    numbers = [panel["id"] for panel in board(name)["panels"]]
    assert numbers == list(range(1, len(numbers) + 1))
    taken: dict[tuple[int, int], str] = {}
    for panel in board(name)["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        for cell in (
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        ):
            assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
            taken[cell] = panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_says_what_it_shows_and_takes_the_chosen_source(name: str) -> None:
    """A description, a unit, a query, the data source variable; no rate over a fixed time."""
    found = board(name)
    assert found["uid"] == f"gradwatch-{name}"
    for panel in panels(name):
        assert len(panel["description"]) > 15, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "$datasource"
        assert panel["targets"]
        for target in panel["targets"]:
            assert not re.search(r"(rate|increase)\([^\[]+\[(?!\$__)", target["expr"]), panel["title"]


def test_the_link_of_every_alert_leads_to_the_dashboard_of_its_run() -> None:
    """uid and variable of the dashboard are those that the alerts name; what is of no run leads to the fleet."""
    text = (DEPLOY / "prometheus/rules/alerts.yml").read_text(encoding="utf-8")
    links = dict(re.findall(r"runbook_url: \S+/(\S+)\n +dashboard_url: \S+?3000(\S+)", text))
    assert links.pop("GradwatchServeDown") == f"/d/{board('fleet')['uid']}"
    assert {link.split("=")[0] for link in links.values()} == {f"/d/{board('run')['uid']}?var-run_id"}
    assert "run_id" in [variable["name"] for variable in board("run")["templating"]["list"]]


def test_the_ranks_to_choose_from_are_those_of_the_panels() -> None:
    """`gradwatch_run_info` says its rank itself; in Kubernetes the label of all other series is NODE.LOCAL."""
    (rank,) = [each for each in board("run")["templating"]["list"] if each["name"] == "rank"]
    assert "gradwatch_run_info" not in str(rank["query"])
    assert str(rank["query"]).startswith("label_values(gradwatch_steps_total{")


class Training:
    """Two ranks that train at 50 steps a second, with everything that a dashboard can show."""

    def __init__(self, folder: Path, targets: Path) -> None:
        self._stop = threading.Event()
        self._sinks = []
        self._health = Health()
        self._health.mark("engine", True)
        self._health.report("journal", OSError("disk full"))
        for rank in range(2):
            sink = PrometheusSink("127.0.0.1:0", file_sd=str(targets))
            sink.open(
                make_run(folder / str(rank), rank=rank, world_size=2, start_time=time.time()), self._health
            )
            self._sinks.append(sink)
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        sites, step = make_sites(30), 0
        while not self._stop.wait(0.02):
            norm = np.abs(np.sin(np.arange(30) + step / 50)).astype(np.float32) + 0.01
            event = make_event(step=step, sites=("layers.1.weight",), count=1)
            bad = step % 100 == 50
            for sink in self._sinks:
                sink.write(
                    make_record(
                        sites,
                        np.where(np.arange(30) == 1, np.nan, norm).astype(np.float32) if bad else norm,
                        step=step,
                        applied=0.5,
                        events=(event,) if bad else (),
                        firing=["non-finite"] if bad else [],
                        decision=skip(shadow=step % 200 == 50) if bad else None,
                        wall_time=time.time(),
                        loss_scale=1024.0,
                        scalars={"loss": 2.0 + float(norm[0]), "lr": 0.1},
                    )
                )
            step += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for sink in self._sinks:
            sink.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that has scraped two ranks for a while, and `gradwatch serve`'s numbers of a fleet."""
    folder = tmp_path_factory.mktemp("dashboards")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with stack(folder, "default") as servers:
        training = Training(folder, servers.targets)
        record_run(
            a_run(folder / "0", "run-0", pid=ended.pid), history()
        )  # for what serve tells of those that ended
        try:
            with served_fleet(folder, servers.serve_port):
                wait_until(lambda: servers.up("run-1") == ["0", "1"], "both ranks are scraped")
                servers.prometheus.wait_for("run_id:gradwatch_rule_firings:increase > 0", 60)
                servers.prometheus.wait_for("gradwatch_serve_processes", 60)
                servers.prometheus.wait_for("gradwatch_run_outcome", 60)
                servers.prometheus.wait_for('ALERTS{alertname="GradwatchNonFiniteGradients"}', 60)
                time.sleep(5)  # curves want more than one point
                yield servers
        finally:
            training.close()


def served_fleet(folder: Path, port: int) -> Any:
    """`gradwatch serve` as systemd runs it."""
    command = [
        sys.executable,
        "-m",
        "gradwatch",
        "serve",
        "--dir",
        str(folder / "0"),
        "--state",
        str(folder / "state"),
    ]
    return running([*command, "--listen", f"127.0.0.1:{port}"], folder / "serve.log")


def substituted(expr: str, name: str) -> str:
    """The expression with everything chosen, as Grafana sends it."""
    values = dict(KNOWN)
    for variable in board(name)["templating"]["list"]:
        if variable["type"] == "query":
            values[f"${variable['name']}"] = variable["allValue"]
    for word in sorted(values, key=len, reverse=True):
        expr = expr.replace(word, values[word])
    assert "$" not in expr, f"unresolved: {expr}"
    return expr


def answer(servers: Stack, expr: str, instant: bool) -> list[float]:
    """Every value of every series."""
    now = time.time()
    if instant:
        asked = urllib.parse.urlencode({"query": expr, "time": now})
        found = servers.prometheus.get(f"/api/v1/query?{asked}")["data"]["result"]
        return [float(each["value"][1]) for each in found]
    asked = urllib.parse.urlencode({"query": expr, "start": now - 30, "end": now, "step": 1})
    found = servers.prometheus.get(f"/api/v1/query_range?{asked}")["data"]["result"]
    return [float(value) for each in found for _, value in each["values"]]


CASES = [
    pytest.param(name, panel["title"], target, id=f"{name}-{panel['title']}-{number}")
    for name in BOARDS
    for panel in panels(name)
    for number, target in enumerate(panel["targets"])
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "title", "target"), CASES)
def test_every_query_of_every_panel_is_answered(
    name: str, title: str, target: dict[str, Any], servers: Stack
) -> None:
    """Neither empty nor NaN throughout: an empty panel is found here and not by somebody on call."""
    values = answer(servers, substituted(target["expr"], name), bool(target.get("instant")))
    assert values, f"{title}: nothing"
    assert any(math.isfinite(value) for value in values), f"{title}: NaN throughout"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_has_values(name: str, servers: Stack) -> None:
    """`label_values(metric{…}, label)` as Grafana asks it."""
    for variable in board(name)["templating"]["list"]:
        if variable["type"] != "query":
            continue
        asked = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
        matched = re.fullmatch(r"label_values\((.*), (\w+)\)", asked)
        assert matched, asked
        match = urllib.parse.urlencode({"match[]": substituted(matched[1], name)})
        assert servers.prometheus.get(f"/api/v1/label/{matched[2]}/values?{match}")["data"], variable["name"]


@pytest.mark.timeout(300)
def test_every_annotation_is_answered(servers: Stack) -> None:
    """Firings, actions and starts are marked on the curves."""
    for annotation in board("run")["annotations"]["list"]:
        assert annotation["datasource"]["uid"] == "$datasource"
        assert answer(servers, substituted(annotation["expr"], "run"), False), annotation["name"]
