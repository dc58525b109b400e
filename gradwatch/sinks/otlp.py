"""OTLP over HTTP: every metric but those of single parameters, to an OpenTelemetry collector.

The names are those of Prometheus. A collector or a Prometheus with an OTLP receiver makes the same series of them
that a scrape would have given, so the dashboards and alerts of deploy/ hold.

opentelemetry's classes hold the data and encode it. Its exporter is not used: on every export, successful ones too,
it draws a jitter from Python's global generator, and training that shuffles or augments with `random` would
come out different. Its requests would also be retried inside one round of the worker, for up to 10 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.optional_dependencies import require
from gradwatch.sinks.http_post import checked_url, post
from gradwatch.sinks.prometheus.exposition import Family, Labels
from gradwatch.sinks.prometheus.file_sd import target_labels
from gradwatch.sinks.prometheus.periodic_export import PeriodicExport
from gradwatch.sinks.registry import state_restored

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, Metric, MetricsData, NumberDataPoint

DEFAULT_URL = "http://127.0.0.1:4318"
_CLOSE_SECONDS = 2.0
_CONTENT_TYPE = "application/x-protobuf"


class OTLPSink:
    """Sends the present metrics to `url`/v1/metrics every `every_seconds`, and once more at the end.

    By default `OTEL_EXPORTER_OTLP_ENDPOINT` names the collector, then http://127.0.0.1:4318. `token_file` holds a
    bearer token. Every rank sends; `run_id` and `rank` (and `process`, of a second one of a rank) are attributes of the
    resource and of every point.
    Counters and histograms are cumulative since the start of the run: what a lost request held, the next one has.

    NaN and Inf are sent as they are: a double of OTLP holds them, and an absent norm would look like no step.
    A backend that refuses them still has `gradwatch_nonfinite_steps_total`. Needs the extra `otlp`.

    Raises:
        MissingDependencyError: opentelemetry is not installed.
        ValueError: `url` is no URL, or `every_seconds` less than 1.
    """

    name = "otlp"
    needs_place = True

    def __init__(
        self, url: str | None = None, every_seconds: float = 15.0, token_file: str | None = None
    ) -> None:
        require("opentelemetry.sdk.metrics.export", "otlp")
        require("opentelemetry.exporter.otlp.proto.common.metrics_encoder", "otlp")
        if not 1 <= every_seconds < float("inf"):
            raise ValueError("every_seconds must be 1 or more")
        base = url or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_URL
        self._url = f"{checked_url(base)}/v1/metrics"
        self._every, self._token_file = every_seconds, token_file
        self._run = RunInfo("", "")
        self._export = PeriodicExport(self.name, self._send)

    def open(self, run: RunInfo, health: Health) -> None:
        """Import opentelemetry and get a worker; the first metrics are on their way at once."""
        with state_restored():
            import opentelemetry.exporter.otlp.proto.common.metrics_encoder
            import opentelemetry.sdk.metrics.export  # noqa: F401
        self._run = run
        self._export.open(run, health)

    def write(self, record: Record) -> None:
        """Add one step to the totals."""
        self._export.add(record)

    def flush(self, timeout: float) -> bool:
        """Send now; False where the collector has not taken it after `timeout` seconds."""
        return self._export.wait_for(timeout)

    def close(self) -> None:
        """Send the final values, waiting at most 2 s."""
        self._export.end(_CLOSE_SECONDS)

    def _send(self) -> float:
        from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

        data = metrics_data(self._export.families(), self._run, time.time_ns())
        post(self._url, encode_metrics(data).SerializeToString(), _CONTENT_TYPE, self._token_file)
        return self._every


def metrics_data(shown: Iterable[Family], run: RunInfo, now: int) -> MetricsData:
    """The families as OpenTelemetry's data model has them; `now` is Unix nanoseconds."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    scope = InstrumentationScope("gradwatch", run.versions.get("gradwatch"))
    start = int(run.start_time * 1e9)
    metrics = [_metric(family, start, now) for family in shown if family]
    resource = Resource(_identity(run))
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])


def _identity(run: RunInfo) -> Mapping[str, str | int]:
    """https://opentelemetry.io/docs/specs/semconv/resource: job and instance are made of the first two."""
    labels = target_labels(run)
    return {
        "service.name": "gradwatch",
        "service.instance.id": labels["instance"],
        "service.version": run.versions.get("gradwatch", ""),
        "host.name": run.host,
        "process.pid": run.pid,
        **{name: text for name, text in labels.items() if name != "instance"},
    }


def _metric(family: Family, start: int, now: int) -> Metric:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, Sum

    cumulative, data = AggregationTemporality.CUMULATIVE, None  # type: AggregationTemporality, Any
    if family.metric.kind == "histogram":
        data = Histogram(list(_histograms(family, start, now)), cumulative)
    elif family.metric.kind == "counter":
        data = Sum(list(_numbers(family, start, now)), cumulative, is_monotonic=True)
    else:
        data = Gauge(list(_numbers(family, None, now)))
    # No unit but seconds: "1" would become a suffix _ratio in Prometheus.
    unit = "s" if family.metric.name.endswith("_seconds") else ""
    return Metric(family.metric.name, family.metric.help, unit, data)


def _numbers(family: Family, start: int | None, now: int) -> Iterator[NumberDataPoint]:
    from opentelemetry.sdk.metrics.export import NumberDataPoint

    for _, labels, value in family.every():
        yield NumberDataPoint(dict(labels), start or 0, now, float(value))


def _histograms(family: Family, start: int, now: int) -> Iterator[HistogramDataPoint]:
    """Counts per bucket of the cumulated ones that Prometheus has; no smallest and no largest value was kept."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    unknown: Any = None
    for labels, series in _by_labels(family).items():
        bounds = [float(bound) for bound in series if bound not in ("_sum", "_count")]
        cumulated = [int(series[bound]) for bound in series if bound not in ("_sum", "_count")]
        counts = [count - before for count, before in zip(cumulated, [0, *cumulated], strict=False)]
        yield HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=start,
            time_unix_nano=now,
            count=int(series["_count"]),
            sum=series["_sum"],
            bucket_counts=counts,
            explicit_bounds=bounds[:-1],  # the last one is +Inf
            min=unknown,
            max=unknown,
        )


def _by_labels(family: Family) -> dict[Labels, dict[str, float]]:
    """The series of each histogram of a family: buckets by their upper bound in order, "_sum" and "_count"."""
    found: dict[Labels, dict[str, float]] = {}
    for suffix, labels, value in family.every():
        own = tuple(pair for pair in labels if pair[0] != "le")
        found.setdefault(own, {})[dict(labels).get("le", suffix)] = value
    return found
