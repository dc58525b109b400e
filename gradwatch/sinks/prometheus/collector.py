"""gradwatch inside a prometheus_client registry of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric as ClientMetric
from prometheus_client.registry import Collector

from gradwatch.sinks.prometheus.metric_catalogue import METRICS, Metric
from gradwatch.sinks.prometheus.metric_values import View, families


class RecordCollector(Collector):
    """Reads the latest Record whenever the registry is collected; nothing is set per step.

    `REGISTRY.register(sink.collector())` puts every gradwatch metric beside the program's own. Use the sink's
    endpoint instead where there is no other registry: it needs a tenth of the time for many parameters.
    """

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    def describe(self) -> Iterable[ClientMetric]:
        """Families without samples, so that a clash of names is found when registering."""
        return [client_metric(metric) for metric in METRICS]

    def collect(self) -> Iterator[ClientMetric]:
        """Every family that has something to show at this moment."""
        for family in families(self._view()):
            if family:
                shown = client_metric(family.metric)
                for suffix, labels, value in family.every():
                    shown.add_sample(family.metric.name + suffix, dict(labels), value)
                yield shown


def client_metric(metric: Metric) -> ClientMetric:
    """An empty family of prometheus_client for a row of the catalogue."""
    # prometheus_client keeps the name of a counter without _total and writes it back itself.
    name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
    return ClientMetric(name, metric.help, metric.kind)
