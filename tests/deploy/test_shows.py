"""The whole way on real servers: a training job, Prometheus, Alertmanager, and somebody who is told.

Each show waits for servers most of its time, and all of them run at once.
"""

from __future__ import annotations

import sys
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradwatch.journal import read_journal
from tests.deploy.jobs import RULES, job, torchrun
from tests.deploy.servers import Stack, running, stack, wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "show.gradwatch.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, rules: Path) -> Iterator[Stack]:
    """One Prometheus and one Alertmanager for all of these jobs, as for a team."""
    with stack(tmp_path_factory.mktemp("stack"), str(rules)) as servers:
        yield servers


def nan(servers: Stack, rules: Path, tmp_path: Path) -> None:
    """A NaN in a batch → rule → scrape → alert → webhook, which names rule, run, rank and severity; then resolved."""
    with job(tmp_path / "a", "show-nan", rules, "--file-sd", str(servers.targets)) as one:
        wait_until(lambda: servers.up("show-nan") == ["0"], "the job is scraped")
        servers.prometheus.wait_for('gradwatch_steps_total{run_id="show-nan"} > 5', 60)
        one.tell("poison")
        began = time.monotonic()
        told = servers.inbox.wait_for("firing", alertname="GradwatchNonFiniteGradients", run_id="show-nan")
        firing = time.monotonic() - began
        assert told["labels"] | {"rule": "non-finite", "severity": "critical", "rank": "0"} == told["labels"]
        assert told["labels"]["instance"] == "show-nan/0"
        assert "show-nan" in told["annotations"]["description"]
        assert told["annotations"]["runbook_url"].endswith("/runbooks/GradwatchNonFiniteGradients")
        servers.inbox.wait_for("resolved", alertname="GradwatchNonFiniteGradients", run_id="show-nan")
        print(f"told after {firing:.2f} s, resolved after {time.monotonic() - began:.2f} s")  # pytest -s
        skipped = servers.prometheus.query('gradwatch_skipped_steps_total{run_id="show-nan"}')
        assert [value for _, value in skipped] == [1]
        # One name each: the labels of the target and of gradwatch_run_info agree.
        ((info, _),) = servers.prometheus.query('gradwatch_run_info{run_id="show-nan"}')
        assert not [name for name in info if name.startswith("exported_")]
        one.end()
    wait_until(lambda: not servers.active_targets("show-nan"), "it is off the list")
    assert not servers.inbox.matching("firing", alertname="GradwatchTargetDown", run_id="show-nan")


def ranks(servers: Stack, rules: Path, tmp_path: Path) -> None:
    """Two ranks, two targets, one run; a clean exit takes both off the list and alerts nobody."""
    options = ("--file-sd", str(servers.targets))
    with job(tmp_path / "b", "show-ranks", rules, *options, program=torchrun(2)) as one:
        wait_until(lambda: servers.up("show-ranks") == ["0", "1"], "both ranks are scraped")
        assert len(list(servers.targets.glob("gradwatch-show-ranks-*.json"))) == 2
        recorded = servers.prometheus.wait_for('run_id:gradwatch_targets:count{run_id="show-ranks"} == 2')
        assert len(recorded) == 1
        one.end()
    assert not list(servers.targets.glob("*show-ranks*"))
    wait_until(lambda: not servers.active_targets("show-ranks"), "they are off the list")
    assert not servers.prometheus.query(
        'ALERTS{alertname="GradwatchTargetDown",run_id="show-ranks",alertstate="firing"}'
    )


@contextmanager
def aggregator(servers: Stack, runs: Path) -> Iterator[None]:
    """`gradwatch serve` at the address that the exported prometheus.yml has."""
    command = [sys.executable, "-m", "gradwatch", "serve", "--dir", str(runs), "--every", "0.5"]
    where = ["--listen", f"127.0.0.1:{servers.serve_port}", "--state", str(runs.parent / "state")]
    runs.mkdir()
    with running([*command, *where], runs.parent / "serve.log"):
        yield


def http_sd(servers: Stack, rules: Path, tmp_path: Path) -> None:
    """No target files: both ranks by `gradwatch serve`; at the end the same series goes on at its final value."""
    with aggregator(servers, tmp_path / "runs"):
        with job(tmp_path / "e", "show-sd", rules, program=torchrun(2)) as one:
            wait_until(lambda: servers.up("show-sd") == ["0", "1"], "both ranks are scraped")
            one.end()
        wait_until(lambda: not servers.active_targets("show-sd"), "they are off the list")
        journals = read_journal(tmp_path / "runs" / "show-sd")
        taken = {str(journal.rank): sum(1 for _ in journal.records()) for journal in journals}
        # Of both ranks: the last scrape of one that was still there may say so before the other is heard of.
        servers.prometheus.wait_for(
            'count(gradwatch_run_outcome{run_id="show-sd",outcome="finished"} == 1) == 2', 60
        )
        final = servers.prometheus.query('gradwatch_steps_total{run_id="show-sd"}')
        assert {labels["rank"]: value for labels, value in final} == taken
        assert {labels["job"] for labels, _ in final} == {"gradwatch"}
        series = servers.prometheus.get(
            "/api/v1/series?" + urllib.parse.urlencode({"match[]": 'gradwatch_steps_total{run_id="show-sd"}'})
        )["data"]
        assert len(series) == 2  # not four: live and ended are one series a rank
    down = 'ALERTS{alertname="GradwatchTargetDown",run_id="show-sd",alertstate="firing"}'
    assert not servers.prometheus.query(down)


def killed(servers: Stack, rules: Path, tmp_path: Path) -> None:
    """SIGKILL: nobody takes the target off the list, so Prometheus notices."""
    with job(tmp_path / "c", "show-killed", rules, "--file-sd", str(servers.targets)) as one:
        wait_until(lambda: servers.up("show-killed") == ["0"], "the job is scraped")
        one.kill()
        told = servers.inbox.wait_for("firing", alertname="GradwatchTargetDown", run_id="show-killed")
    assert (told["labels"]["severity"], told["labels"]["rank"]) == ("warning", "0")


def hung(servers: Stack, rules: Path, tmp_path: Path) -> None:
    """The process answers and no step comes: stalled, not down; when it goes on, resolved."""
    with job(tmp_path / "d", "show-hung", rules, "--file-sd", str(servers.targets)) as one:
        wait_until(lambda: servers.up("show-hung") == ["0"], "the job is scraped")
        servers.prometheus.wait_for('gradwatch_steps_total{run_id="show-hung"} > 5', 60)
        one.tell("hang")
        told = servers.inbox.wait_for("firing", alertname="GradwatchRunStalled", run_id="show-hung")
        assert (told["labels"]["severity"], told["labels"]["rank"]) == ("critical", "0")
        assert not servers.inbox.matching("firing", alertname="GradwatchTargetDown", run_id="show-hung")
        (one.folder / "hang").unlink()
        servers.inbox.wait_for("resolved", alertname="GradwatchRunStalled", run_id="show-hung")
        one.end()


SHOWS = {
    "a NaN reaches the webhook and resolves": nan,
    "both ranks of a torchrun are found, and gone after exit": ranks,
    "http_sd finds ranks and keeps the last counters of a run that ended": http_sd,
    "a killed job is reported as down": killed,
    "a hung job is reported as stalled": hung,
}


@pytest.fixture(scope="module")
def shows(
    servers: Stack, rules: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """Every show, under way."""
    with ThreadPoolExecutor(len(SHOWS)) as stages:
        yield {
            name: stages.submit(show, servers, rules, tmp_path_factory.mktemp(show.__name__))
            for name, show in SHOWS.items()
        }


@pytest.mark.parametrize("name", SHOWS)
def test_a_show_goes_on_to_its_end(name: str, shows: dict[str, Future[None]]) -> None:
    """A job, servers and somebody who is told do together what the show's function says."""
    shows[name].result()
