"""The live view from the /metrics of a process that serves them."""

from __future__ import annotations

import platform
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from gradwatch.errors import GradwatchError
from gradwatch.report.live import MetricsSource
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.serve.test_server import fetch, served
from tests.support.sink_records import make_event, make_record, make_run, make_sites, serving, skip


def test_what_is_exported_is_shown(tmp_path: Path) -> None:
    """State, norms, actions and firing rules, with or without the path; a firing that begins between two looks."""
    sites = make_sites(3)
    with serving(tmp_path) as sink:
        assert sink.url is not None
        sink.write(make_record(sites, [1, 2, 3], step=0, scalars={"loss": 0.5, "lr": 0.1}))
        with MetricsSource(sink.url.removesuffix("/metrics")) as source:
            view = source.view(0.0)
            assert (view.run_id, view.process, view.steps) == ("run-1", "running", 1)
            assert (view.optimizers[0].loss, view.optimizers[0].lr) == (0.5, 0.1)
            assert {one.name: one.norm for one in view.parameters} == dict(
                zip(sites.names, [1, 2, 3], strict=True)
            )
            assert not view.firing
            event = make_event(step=1, sites=sites.names[:1], count=1)
            sink.write(make_record(sites, step=1, events=(event,), firing=["non-finite"], decision=skip()))
            sink._body = None  # served anew at once
            view = source.view(0.0)
            assert [(one.rule, one.severity) for one in view.firing] == [("non-finite", "critical")]
            assert (view.actions, view.skipped, view.fired) == ({"skip_step": 1}, 1, {"non-finite": 1})
            assert [one.kind for one in view.lately] == ["firing"]


def test_an_end_of_the_process_is_said(tmp_path: Path) -> None:
    """Where nothing answers any more, the last numbers stay."""
    with serving(tmp_path) as sink:
        assert sink.url is not None
        sink.write(make_record(make_sites(3)))
        source = MetricsSource(sink.url)
    view = source.view(0.0)
    assert (view.process, view.steps) == ("unreachable", 1)


def test_what_is_no_process_of_ours_is_refused() -> None:
    """An address at which nothing listens, with the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(GradwatchError, match=f"cannot read http://127.0.0.1:{port}/metrics: "):
            MetricsSource(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "url", ["http://me:hunter@host:1", "http://me:hunter@[host", "http://me:hun/hunter@h"]
)
def test_a_password_is_not_repeated(url: str) -> None:
    """Also where the address is wrong in other ways."""
    with pytest.raises(GradwatchError, match="has a user or password") as refused:
        MetricsSource(url)
    assert "hun" not in str(refused.value)


def test_serve_is_told_from_a_process(tmp_path: Path) -> None:
    """`gradwatch serve` has many runs: what can be typed instead is said."""
    (tmp_path / "run-1").mkdir()  # where the sink says its address
    sink = PrometheusSink("127.0.0.1:0")
    sink.open(make_run(tmp_path, host=platform.node()), Health())
    with closing(sink), served(tmp_path) as url:
        while fetch(f"{url}/runs.json")[0] != 200:
            time.sleep(0.05)  # its first look
        typed = rf"gradwatch top http://{str(sink.url).split('/')[2]} \(run-1 rank 0\)"
        with pytest.raises(GradwatchError, match=typed):
            MetricsSource(url)
