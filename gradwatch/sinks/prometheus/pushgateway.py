"""The outcome of a run, pushed to a Pushgateway when it ends.

Only that: https://prometheus.io/docs/practices/pushing says why nothing else should be pushed. What the gateway
has it keeps for ever, so a run takes away what an earlier attempt of its own rank left; after that, delete the group
`/metrics/job/gradwatch/run_id/RUN/rank/RANK` when it is not needed any more. That of a second process of a rank (see
`RunInfo.place`) ends with `/process/NUMBER`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, delete_from_gateway, push_to_gateway
from prometheus_client.metrics_core import Metric as ClientMetric
from prometheus_client.registry import Collector

from gradwatch.account import Account
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import Job, background_worker
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.printable import printable
from gradwatch.sinks.http_post import TIMEOUT_SECONDS, checked_url
from gradwatch.sinks.prometheus.collector import client_metric
from gradwatch.sinks.prometheus.file_sd import target_labels
from gradwatch.sinks.prometheus.final_metrics import final_families
from gradwatch.sinks.prometheus.metric_values import RunEnd, View, families, outcome_of
from gradwatch.sinks.prometheus.sink import PrometheusSink

_CLOSE_SECONDS = 2.0


class PushgatewaySink:
    """Pushes the final counters, and how the run ended, to the Pushgateway at `url` under `job`.

    At the start of a run its own group of an earlier attempt is deleted. Both are done by a thread; the exit of the
    script waits for the push at most 2 s. A killed process pushes nothing.
    """

    name = "pushgateway"
    needs_place = True

    def __init__(self, url: str = "http://127.0.0.1:9091", job: str = "gradwatch") -> None:
        self._gateway, self._job_label = checked_url(url), job
        self._metrics = PrometheusSink(None, params="off")
        self._group: dict[str, str] = {}
        self._stopped = self._closed = False
        self._ended = ""
        self._job: Job | None = None

    def open(self, run: RunInfo, health: Health) -> None:
        """Have what an earlier attempt left deleted."""
        labels = target_labels(run).items()
        self._group = {name: printable(text) for name, text in labels if name != "instance"}
        self._metrics.open(run, health)
        if self._job is None:
            self._job = background_worker().enter(self.name, self._deliver, health)
        background_worker().wake(self._job)

    def write(self, record: Record) -> None:
        """Add one step to the totals."""
        self._stopped |= record.decision.stop
        self._metrics.write(record)

    def conclude(self, account: Account) -> None:
        """Note from the account how the run ended: as it should, by Ctrl-C, by an exception."""
        self._ended = account.ended

    def flush(self, timeout: float) -> bool:
        """No-op: nothing is due before the end."""
        return True

    def close(self) -> None:
        """Push the outcome, waiting at most 2 s."""
        ended, self._job = self._job, None
        if ended is None or ended.inherited:
            return
        self._closed = True
        background_worker().wait_for(ended, _CLOSE_SECONDS)
        background_worker().leave(ended)

    def _deliver(self) -> None:
        if not self._closed:
            delete_from_gateway(self._gateway, self._job_label, self._group, timeout=TIMEOUT_SECONDS)
            return
        view = self._metrics.view()
        end = RunEnd(outcome_of(self._ended, self._stopped), time.time())
        registry = CollectorRegistry()
        registry.register(_Final(replace(view, end=end), frozenset(self._group)))
        push_to_gateway(self._gateway, self._job_label, registry, self._group, timeout=TIMEOUT_SECONDS)


class _Final(Collector):
    """The lasting families of one View, less the labels that the group has already."""

    def __init__(self, view: View, grouped: frozenset[str]) -> None:
        self._view, self._grouped = view, grouped

    def describe(self) -> Iterable[ClientMetric]:
        return []

    def collect(self) -> Iterator[ClientMetric]:
        for family in final_families(families(self._view)):
            if family:
                metric = client_metric(family.metric)
                for suffix, labels, value in family.series:
                    kept = {name: text for name, text in labels if name not in self._grouped}
                    metric.add_sample(family.metric.name + suffix, kept, value)
                yield metric
