"""The Prometheus sink: the training thread keeps totals, the endpoint's thread makes text of them."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.endpoint.address import DEFAULT_LISTEN, Address, parse_listen, rank_address
from gradwatch.endpoint.http_protocol import Content, plain
from gradwatch.endpoint.http_server import Endpoint, Limits
from gradwatch.endpoint.listening_port import listening_socket, remove_endpoint, write_endpoint
from gradwatch.endpoint.run_reports import PREFIX as REPORTS
from gradwatch.endpoint.run_reports import RunPlace, ServedReports, path_of
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.printable import printable
from gradwatch.sinks.parameter_selection import (
    ParameterChoice,
    ParamsMode,
    Selection,
    SeriesBudget,
)
from gradwatch.sinks.prometheus.exposition import CONTENT_TYPE, render
from gradwatch.sinks.prometheus.file_sd import remove_target, strangers, write_target
from gradwatch.sinks.prometheus.last_columns import ColumnSeries, LastColumns
from gradwatch.sinks.prometheus.metric_values import (
    Layout,
    OptimizerView,
    Value,
    View,
    families,
    optimizer_labels,
)
from gradwatch.sinks.prometheus.run_totals import NAMES_LEFT_OUT, STALL_FLOOR_SECONDS, RunTotals
from gradwatch.sinks.prometheus.start_page import status_page

if TYPE_CHECKING:
    from gradwatch.sinks.prometheus.collector import RecordCollector

MAX_OPTIMIZERS = 16
"""A program that makes a new optimizer every epoch must not make new series for ever: the stalest goes."""
_STALE_SECONDS = 0.5


class _Optimizer:
    """State of one optimizer in the sink; `layout` belongs to the thread that renders."""

    def __init__(self, run_totals: RunTotals, selection: Selection, columns: bool) -> None:
        self.run_totals, self.selection = run_totals, selection
        self.last_columns = LastColumns() if columns else None
        self.layout: tuple[str, Layout] | None = None


class PrometheusSink:
    """Exports the catalogue of `gradwatch.sinks.prometheus.metric_catalogue` on an HTTP endpoint of this process.

    `listen` is "HOST:PORT" with a numeric host; LOCAL_RANK is added to the port, and a port in use gives way
    to a free one. None: no endpoint, only `collector()`. `params` says which parameters get a series of their
    own: off, worst (`top_k` seats, sticky), match (globs of `match`) or all, at most `max_series` in total; of their
    columns, that rules have read, at most as many again.
    `file_sd` names a folder in which Prometheus finds its targets: this process puts itself there, and takes
    itself away at a clean exit. `stall_seconds`: the least time without a step that counts as a stall.

    `open` raises OSError where nothing can listen on that host at all; `url` is None then.
    """

    name = "prometheus"

    def __init__(
        self,
        listen: str | None = DEFAULT_LISTEN,
        params: ParamsMode = "worst",
        top_k: int = 20,
        max_series: int = 200,
        match: Sequence[str] = (),
        file_sd: str | None = None,
        stall_seconds: float = STALL_FLOOR_SECONDS,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = ParameterChoice(params, top_k, max_series, tuple(match))
        if not 0 < stall_seconds < math.inf:
            raise ValueError(f"stall_seconds: {stall_seconds} is not a positive number of seconds")
        self.listen = parse_listen(listen) if listen is not None else None
        self.url: str | None = None
        self.moved = ""  # where it serves instead, and why, if the port asked for could not be had
        self._limits, self._clock = limits, clock
        self._file_sd, self._stall_seconds = file_sd, stall_seconds
        self._budget = SeriesBudget(max_series)
        self._column_series = ColumnSeries(max_series)
        self._lock = threading.Lock()
        self._optimizers: dict[int, _Optimizer] = {}
        self._version = 0
        self._run = RunInfo("", "")
        self._health = Health()
        self._endpoint: Endpoint | None = None
        self._reports: ServedReports | None = None
        self._endpoint_file: tuple[str, Address] | None = None
        self._target_file: tuple[str, Address] | None = None
        self._body: tuple[object, float, Content] | None = None
        _SINKS.add(self)

    @property
    def needs_place(self) -> bool:
        """True if it is to be scraped: what only has a `collector()` is labelled by whoever serves that."""
        return self.listen is not None

    def open(self, run: RunInfo, health: Health) -> None:
        """Start serving `run`; raises OSError when nothing can listen there."""
        self._run, self._health = run, health
        if self.listen is None or self._endpoint is not None:
            return
        wanted = rank_address(self.listen, run.local_rank)
        listener = listening_socket(wanted)
        routes = {"/metrics": self._metrics, "/healthz": lambda _: plain("ok"), "/": self._page}
        place = {path_of(run.run_id): RunPlace(Path(run.directory), run.rank, True)}
        self._reports = ServedReports(place.get)
        below = {REPORTS: self._reports.answer}
        self._endpoint = Endpoint(listener, routes, self._failed, self._limits, below)
        self._endpoint.start()
        address = self._endpoint.address
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
        self.url = f"http://{address._replace(host=reachable)}/metrics"
        if wanted.port not in (0, address.port):
            self.moved = f"{wanted} is taken or not allowed; /metrics is served at {self.url}"
        try:
            self._endpoint_file = write_endpoint(run, address, self.url), address
        except OSError as error:
            self._failed(error)  # the endpoint works all the same; only discovery by file does not
        if self._file_sd is None:
            return
        try:
            self._target_file = write_target(self._file_sd, run, address), address
            unread = strangers(self._file_sd)
            if unread:
                listed = ", ".join(map(printable, unread[:3])) + (", …" if len(unread) > 3 else "")
                self._health.notice(
                    self.name,
                    f"{self._file_sd} holds files that are not lists of targets; they were not changed: {listed}",
                )
        except OSError as error:
            self._failed(error)

    def write(self, record: Record) -> None:
        """Add one step to the totals."""
        with self._lock:
            optimizer = self._optimizer(record.snapshot.optimizer)
            optimizer.run_totals.observe(record, self._clock())
            optimizer.selection.update(record)
            if optimizer.last_columns is not None and record.snapshot.columns:
                optimizer.last_columns.observe(record.snapshot)
            self._version += 1
        if optimizer.run_totals.names_left_out:
            self._health.notice(self.name, NAMES_LEFT_OUT)

    def write_all(self, records: Sequence[Record]) -> None:
        """Add several steps of one optimizer to the totals, on which no rule changed."""
        with self._lock:
            optimizer = self._optimizer(records[0].snapshot.optimizer)
            optimizer.run_totals.observe_all(records, self._clock())
            optimizer.selection.update_all(records)
            if optimizer.last_columns is not None:
                for record in records:
                    if record.snapshot.columns:
                        optimizer.last_columns.observe(record.snapshot)
            self._version += len(records)
        if optimizer.run_totals.names_left_out:
            self._health.notice(self.name, NAMES_LEFT_OUT)

    def _optimizer(self, index: int) -> _Optimizer:
        return self._optimizers.get(index) or self._admit(index)

    def flush(self, timeout: float) -> bool:
        """No-op: the next scrape shows the last step."""
        return True

    def close(self) -> None:
        """Stop serving, free the port, take its own `endpoint-rank{rank}.json` away."""
        # Off the list first: a scrape that finds no server would look like a death.
        target, self._target_file = self._target_file, None
        if target is not None:
            remove_target(*target)
        endpoint, self._endpoint, self.url = self._endpoint, None, None
        if endpoint is not None and not endpoint.close():
            self._failed(TimeoutError("the endpoint's thread did not end in time"))
        if self._reports is not None:
            self._reports.close()
        path, self._endpoint_file = self._endpoint_file, None
        if path is not None:
            remove_endpoint(*path)

    def collector(self) -> RecordCollector:
        """The same metrics for a prometheus_client registry of your own."""
        from gradwatch.sinks.prometheus.collector import RecordCollector

        return RecordCollector(self.view)

    def view(self) -> View:
        """Everything a scrape shows, copied at this moment."""
        with self._lock:
            numbered = [
                (index, each, each.run_totals.copy(), each.selection.chosen)
                for index, each in self._optimizers.items()
            ]
        labels = optimizer_labels({index: run_totals for index, _, run_totals, _ in numbered})
        optimizers = []
        for index, optimizer, run_totals, chosen in numbered:
            label = labels[index]
            layout = optimizer.layout
            if chosen is not None and (
                layout is None or layout[0] != label or layout[1].chosen is not chosen
            ):
                layout = optimizer.layout = (label, Layout.of(chosen, label))
            shown = layout[1] if layout else None
            values, left_out = self._columns(index, optimizer, shown)
            optimizers.append(OptimizerView(label, run_totals, shown, values, left_out))
        if not optimizers:
            optimizers.append(
                OptimizerView("", RunTotals.of(self._run.rules, self._stall_seconds, self._run.rank))
            )
        health = self._health
        facts = health.errors(), health.up()
        inactive = {**health.without_data(), **health.inactive()}
        return View(
            self._run,
            tuple(optimizers),
            *facts,
            inactive=inactive,
            process=health.process(),
            last_reload_successful=health.last_reload_successful,
        )

    def _columns(
        self, index: int, optimizer: _Optimizer, layout: Layout | None
    ) -> tuple[tuple[Value, ...], int]:
        """The columns of the parameters of one optimizer that are shown, and how many series found no room."""
        if layout is None or optimizer.last_columns is None:
            return (), 0
        sites, indices = layout.chosen.sites, layout.chosen.indices
        shown, values = dict(zip(indices.tolist(), layout.shown, strict=True)), []
        with self._lock:
            for column, at, value in optimizer.last_columns.of(sites, indices):
                if self._column_series.admit(index, column, sites.names[at]):
                    values.append(((column, *shown[at]), value))
            return tuple(values), self._column_series.refused(index)

    def render(self) -> bytes:
        """A scrape as it would be answered now."""
        return render(families(self.view()))

    def _admit(self, index: int) -> _Optimizer:
        if len(self._optimizers) >= MAX_OPTIMIZERS:
            stalest = min(self._optimizers, key=lambda i: _last_seen(self._optimizers[i].run_totals))
            self._budget.give(self._optimizers.pop(stalest).selection.admitted)
            self._column_series.drop(stalest)
        choice = self._choice
        selection = Selection(choice.params, choice.top_k, choice.match, self._budget)
        run_totals = RunTotals.of(self._run.rules, self._stall_seconds, self._run.rank)
        self._optimizers[index] = _Optimizer(run_totals, selection, columns=choice.params != "off")
        return self._optimizers[index]

    def _metrics(self, hurried: bool) -> Content:
        """The scrape: made once per step, and when CPU is short at most every half second."""
        health = self._health
        facts = health.errors(), health.up(), health.inactive(), health.without_data(), health.process()
        key = (self._version, *(tuple(each.items()) for each in facts))
        now = time.monotonic()
        if self._body is not None:
            made_of, made_at, content = self._body
            if made_of == key or (hurried and now - made_at < _STALE_SECONDS):
                return content
        content = Content(CONTENT_TYPE, self.render())
        self._body = (key, now, content)
        return content

    def _page(self, hurried: bool) -> Content:
        return status_page(self.view(), time.time())

    def _failed(self, error: BaseException) -> None:
        self._health.report(self.name, error)


_SINKS: weakref.WeakSet[PrometheusSink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Renew the locks in a forked child: another thread may have held one at the fork."""
    for sink in list(_SINKS):
        sink._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _last_seen(run_totals: RunTotals) -> float:
    return run_totals.record.wall_time if run_totals.record is not None else 0.0
