"""The registry: sinks by the names used in rule files, loaded only when asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from gradwatch.errors import AttachError
from gradwatch.rules.sink_kinds import SINKS
from gradwatch.sinks import Sink, find_sink, make_sink, register_sink, sink_names
from gradwatch.sinks.log import LogSink
from gradwatch.sinks.prometheus.sink import PrometheusSink


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            "prometheus",
            {"listen": "127.0.0.1:0", "params": "match", "match": ["*"], "top_k": 3, "max_series": 9},
        ),
        ("log", {"format": "json"}),
        ("journal", {}),
        ("alertmanager", {"url": "http://127.0.0.1:9093", "labels": {"team": "a"}}),
        ("textfile", {"dir": "/nowhere"}),
        ("pushgateway", {}),
        ("otlp", {"url": "http://127.0.0.1:4318", "every_seconds": 5.0}),
        ("wandb", {"project": "p", "entity": "e", "group": "g", "every": 5, "alerts": False}),
        ("tensorboard", {"dir": "/nowhere", "every": 5}),
        ("mlflow", {"tracking_uri": "file:///nowhere", "experiment": "e", "every": 5}),
    ],
)
def test_each_built_in_sink_is_built_by_name(kind: str, options: dict[str, object]) -> None:
    """What a rule file may say about sinks builds one that keeps the protocol."""
    sink = make_sink(kind, options)
    assert isinstance(sink, Sink)
    assert sink.name == kind
    sink.close()


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("promtheus", {}, "did you mean 'prometheus'"),
        ("carrier-pigeon", {}, "there are: alertmanager, email, journal, log, mlflow, otlp, prometheus"),
        ("prometheus", {"topk": 3}, "no option 'topk'; did you mean 'top_k'"),
        ("prometheus", {"params": "best"}, "'best' is not one of off, worst, match, all"),
        ("prometheus", {"params": "match"}, "needs globs"),
        ("prometheus", {"top_k": -1}, "negative"),
        ("prometheus", {"listen": "29440"}, "write for example 127.0.0.1:29440"),
        ("prometheus", {"listen": ":29440"}, "0.0.0.0:PORT"),
        ("prometheus", {"listen": "example.org:29440"}, "0.0.0.0:PORT"),
        ("prometheus", {"listen": "127.0.0.1:70000"}, "65535"),
        ("log", {"format": "xml"}, "'xml' is not one of console, json"),
    ],
)
def test_what_is_wrong_is_said(kind: str, options: dict[str, object], says: str) -> None:
    """An unknown sink, an unknown option or a wrong value is an AttachError that names it."""
    with pytest.raises(AttachError) as refused:
        make_sink(kind, options)
    assert says in str(refused.value)


@pytest.fixture
def own_kinds() -> Iterator[None]:
    """What a test registers is gone after it."""
    registered = set(SINKS)
    yield
    for taken in SINKS.keys() - registered:
        del SINKS[taken]


@pytest.mark.usefixtures("own_kinds")
def test_a_sink_of_ones_own() -> None:
    """Registered under a new name it is as good as built in; a name is never taken twice."""
    kind = "only-in-this-test"
    register_sink(kind, LogSink)
    assert kind in sink_names()
    assert find_sink(kind) is LogSink
    assert isinstance(make_sink(kind, {"format": "json"}), LogSink)
    with pytest.raises(ValueError, match="registered already"):
        register_sink(kind, PrometheusSink)
    register_sink(f"{kind}-broken", "gradwatch.no_such_module:Nothing")
    with pytest.raises(AttachError, match="cannot be loaded"):
        make_sink(f"{kind}-broken")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """The registry loads no server, structlog or prometheus_client; the endpoint needs only the first."""
    check = (
        "import sys, gradwatch.sinks\n"
        "heavy = {'structlog', 'prometheus_client', 'torch', 'gradwatch.endpoint.http_server'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "sink = gradwatch.sinks.make_sink('prometheus')\n"
        "assert not (heavy - {'gradwatch.endpoint.http_server'}) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
