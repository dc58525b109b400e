"""The totals of a process on their way out, time and again, in the worker's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import Job, background_worker
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.printable import printable
from gradwatch.sinks.prometheus.exposition import Family, Labels
from gradwatch.sinks.prometheus.file_sd import target_labels
from gradwatch.sinks.prometheus.final_metrics import labelled
from gradwatch.sinks.prometheus.metric_values import families
from gradwatch.sinks.prometheus.sink import PrometheusSink


class PeriodicExport:
    """All metrics but those of single parameters, every series with `run_id` and `rank` (and `process`, if it has one).

    `ship` takes them away, in the worker's thread, and returns the seconds until it is due again; its faults are
    those of the sink `name`. A forked child ships nothing: the round is its parent's.
    """

    def __init__(self, name: str, ship: Callable[[], float]) -> None:
        self._name, self._ship = name, ship
        self._metrics = PrometheusSink(None, params="off")
        self._labels: Labels = ()
        self._job: Job | None = None

    @property
    def is_open(self) -> bool:
        """True if this process has begun to ship and has not ended it."""
        return self._job is not None and not self._job.inherited

    def open(self, run: RunInfo, health: Health) -> None:
        """Begin; the first shipment is on its way at once."""
        self._labels = tuple(
            (key, printable(text)) for key, text in target_labels(run).items() if key != "instance"
        )
        self._metrics.open(run, health)
        if self._job is None:
            self._job = background_worker().enter(self._name, self._ship, health)
        background_worker().wake(self._job)

    def add(self, record: Record) -> None:
        """Count one more step."""
        self._metrics.write(record)

    def families(self) -> Iterator[Family]:
        """Metric families to export now."""
        return labelled(families(self._metrics.view()), self._labels)

    def wait_for(self, timeout: float) -> bool:
        """Ship now; False where it has not arrived after `timeout` seconds."""
        if self._job is None or not self.is_open:
            return True
        return background_worker().wait_for(self._job, timeout)

    def end(self, timeout: float = 0.0) -> bool:
        """Ship no more, after a last time that may take `timeout` seconds (0: none). False where it was not open."""
        ended, self._job = self._job, None
        if ended is None or ended.inherited:
            return False
        if timeout:
            background_worker().wait_for(ended, timeout)
        background_worker().leave(ended)
        return True
