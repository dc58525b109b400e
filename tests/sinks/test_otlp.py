"""The OTLP sink, against a collector that decodes the protobuf."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks.otlp import OTLPSink
from gradwatch.sinks.prometheus.exposition import render
from gradwatch.sinks.prometheus.metric_values import families
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.sinks.otlp_collector import collecting
from tests.support.sink_records import make_event, make_record, make_run, make_sites, skip

SITES = make_sites(4)
CUMULATIVE = 2


def records() -> list[Any]:
    """Ten steps: the fourth is not finite and skipped, a rule fires on it and is resolved after."""
    made = [make_record(SITES, 0.5 + step, step=step, applied=0.5) for step in range(10)]
    made[3] = make_record(
        SITES, math.nan, step=3, events=(make_event(step=3),), firing=["non-finite"], decision=skip()
    )
    made[5] = make_record(SITES, 1.0, step=5, events=(make_event("resolved", step=5),))
    return made


def attributes(point: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


def test_the_collector_gets_what_a_scrape_would_show(tmp_path: Path) -> None:
    """Every series of the Prometheus text but the parameters' own arrives with the same name, labels and value."""
    scraped = PrometheusSink(None, params="off")
    run = make_run(tmp_path, start_time=1_700_000_000.0)
    scraped.open(run, Health())
    with collecting() as collector:
        sink = OTLPSink(collector.url)
        sink.open(run, Health())
        for record in records():
            sink.write(record)
            scraped.write(record)
        assert sink.flush(10)
        sent = collector.metrics()
        sink.close()
    text = render(families(scraped.view())).decode()
    expected = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    told: dict[Any, float] = {}
    for name, metric in sent.items():
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = attributes(point)
            assert labels.pop("run_id") == "run-1"
            assert labels.pop("rank") == "0"
            if name in ("gradwatch_run_info",):  # run_id and rank are labels of its own
                labels |= {"run_id": "run-1", "rank": "0"}
            key = frozenset(labels.items())
            if kind != "histogram":
                told[name, key] = point.as_double
                continue
            told[f"{name}_sum", key], told[f"{name}_count", key] = point.sum, point.count
            bounds = [*point.explicit_bounds, math.inf]
            for bound, count in zip(bounds, np.cumsum(point.bucket_counts), strict=True):
                told[f"{name}_bucket", key | {("le", bound)}] = count
    expected = {
        (name, frozenset((key, float(value) if key == "le" else value) for key, value in labels)): number
        for (name, labels), number in expected.items()
    }
    told = {key: value for key, value in told.items() if "component" not in dict(key[1])}  # its own health
    assert told.keys() == expected.keys()
    assert len(told) > 60
    for key, value in told.items():
        assert value == pytest.approx(expected[key], rel=1e-6, nan_ok=True), key


def test_kinds_times_and_identity(tmp_path: Path) -> None:
    """Counters are cumulative and monotonic since the start of the run; the resource names run and rank."""
    with collecting() as collector:
        sink = OTLPSink(collector.url)
        sink.open(make_run(tmp_path, rank=3, start_time=1_700_000_000.0), Health())
        for record in records():
            sink.write(record)
        sink.close()
        sent = collector.metrics()
        path, heads = collector.heads[-1]
        resource = attributes(collector.requests[-1].resource_metrics[0].resource)
    assert path == "/v1/metrics"
    assert heads["Content-Type"] == "application/x-protobuf"
    steps = sent["gradwatch_steps_total"].sum
    assert steps.is_monotonic
    assert steps.aggregation_temporality == CUMULATIVE
    (point,) = steps.data_points
    assert (point.as_double, point.start_time_unix_nano) == (10, 1_700_000_000 * 10**9)
    assert sent["gradwatch_step_duration_seconds"].histogram.aggregation_temporality == CUMULATIVE
    assert sent["gradwatch_step_duration_seconds"].unit == "s"
    assert sent["gradwatch_overhead_ratio"].unit == ""
    assert (resource["service.name"], resource["service.instance.id"]) == ("gradwatch", "run-1/3")
    assert attributes(point)["rank"] == "3"


def test_a_second_process_of_a_rank_is_another_instance(tmp_path: Path) -> None:
    """`process` is an attribute of the resource and of every point."""
    with collecting() as collector:
        sink = OTLPSink(collector.url)
        sink.open(make_run(tmp_path, rank=3, place=2), Health())
        sink.write(make_record(SITES))
        sink.close()
        (point,) = collector.metrics()["gradwatch_steps_total"].sum.data_points
        resource = attributes(collector.requests[-1].resource_metrics[0].resource)
    assert attributes(point) == {"run_id": "run-1", "rank": "3", "process": "2"}
    assert (resource["service.instance.id"], resource["process"]) == ("run-1/3/2", "2")


def test_a_norm_that_is_not_finite_is_sent_as_it_is(tmp_path: Path) -> None:
    """NaN arrives as NaN, never as 0 or not at all, and the counter beside says how often."""
    with collecting() as collector:
        sink = OTLPSink(collector.url)
        sink.open(make_run(tmp_path), Health())
        sink.write(make_record(SITES, math.nan, step=0))
        assert sink.flush(10)
        sent = collector.metrics()
        sink.close()
    (norm,) = sent["gradwatch_grad_norm"].gauge.data_points
    assert norm.WhichOneof("value") == "as_double"
    assert math.isnan(norm.as_double)
    (count,) = sent["gradwatch_nonfinite_steps_total"].sum.data_points
    assert count.as_double == 1


def test_a_collector_that_refuses_is_counted_and_changes_no_random_number(tmp_path: Path) -> None:
    """A 503 is an error of ours and not of the training; Python's generator stands where it stood."""
    health = Health()
    with collecting() as collector:
        sink = OTLPSink(collector.url)
        random.seed(1)
        before = random.getstate()
        sink.open(make_run(tmp_path), health)
        assert sink.flush(10)
        collector.status = 503
        assert not sink.flush(10)
        assert health.errors() == {"otlp": 1}
        assert health.up()["otlp"] is False
        collector.status = 200
        assert sink.flush(10)
        assert health.up()["otlp"] is True
        sink.close()
        assert random.getstate() == before


def test_nothing_waits_for_a_collector_that_is_away(tmp_path: Path) -> None:
    """Steps are written and the sink is closed where nobody listens."""
    health = Health()
    sink = OTLPSink("http://127.0.0.1:9")
    sink.open(make_run(tmp_path), health)
    for record in records():
        sink.write(record)
    sink.close()
    sink.close()
    assert health.errors()["otlp"] >= 1


def test_the_environment_names_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT, as everybody has it; the token of a file goes with every request."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url + "/")
        sink = OTLPSink(token_file=str(token))
        sink.open(make_run(tmp_path), Health())
        sink.close()
        assert collector.heads[-1][1]["Authorization"] == "Bearer secret"
