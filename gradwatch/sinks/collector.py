"""gradwatch inside somebody's own prometheus_client registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric as ClientMetric
from prometheus_client.registry import Collector

from gradwatch.sinks.exposition import Family, Series
from gradwatch.sinks.families import View, families
from gradwatch.sinks.metrics import METRICS, Metric


class RecordCollector(Collector):
    """Reads the latest Record whenever the registry is collected; nothing is set per step.

    `REGISTRY.register(sink.collector())` puts every gradwatch metric beside the program's own. Use the sink's
    endpoint instead where there is no other registry: it needs a tenth of the time for many parameters.
    """

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    def describe(self) -> Iterable[ClientMetric]:
        """All families without samples, so that a clash of names is found when registering."""
        return [_client_metric(metric) for metric in METRICS]

    def collect(self) -> Iterator[ClientMetric]:
        """Every family that has something to show at this moment."""
        for family in families(self._view()):
            if family:
                client_metric = _client_metric(family.metric)
                for suffix, labels, value in _series(family):
                    client_metric.add_sample(_base(family.metric, suffix), dict(labels), value)
                yield client_metric


def _client_metric(metric: Metric) -> ClientMetric:
    # prometheus_client keeps the name of a counter without _total and writes it back itself.
    name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
    return ClientMetric(name, metric.help, metric.kind)


def _base(metric: Metric, suffix: str) -> str:
    return metric.name + suffix


def _series(family: Family) -> Iterator[Series]:
    yield from family.series
    for block in family.blocks:
        rows = zip(block.lines.labels, block.values.tolist(), block.present.tolist(), strict=True)
        for labels, value, present in rows:
            if present:
                yield Series("", labels, value)
