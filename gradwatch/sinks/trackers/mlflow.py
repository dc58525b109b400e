"""MLflow: metrics and tags on the script's own run where there is one, else on a new one."""

from __future__ import annotations

import math
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import BackgroundWorker
from gradwatch.runtime.optional_dependencies import require
from gradwatch.sinks.parameter_selection import ParameterChoice, ParamsMode
from gradwatch.sinks.trackers.incident_list import NAME
from gradwatch.sinks.trackers.points import Point
from gradwatch.sinks.trackers.tracker import DEFAULT_EVERY, Tracker

MOST_METRICS = 1000
"""What one request may hold (https://mlflow.org/docs/latest/rest-api.html#log-batch)."""

LIST_SECONDS = 60.0
"""Between two writes of the list of incidents."""

_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
_LONGEST_KEY = 250
_LONGEST_TAG = 5000


class MLflowSink(Tracker):
    """Logs a point every `every` steps, and of every step on which something happens.

    The run is the one that is active on the training thread when the watch begins, or the one MLFLOW_RUN_ID
    names; else a new one in `experiment` at `tracking_uri`. The state of `mlflow`'s module functions is not changed.
    Each rule that begins or ceases to fire is a tag `gradwatch.rule.RULE`, its latest transition; all of them, with
    their steps and causes, are the artifact `gradwatch/incidents.md` (the last 200), written at most once a minute and
    at the end. Where the store of artifacts refuses it that is reported once, and the metrics go on.

    MLflow's stores disagree on what is not finite: files keep NaN and Inf, a database turns Inf into ±1.8e308, and
    charts leave NaN out. So every value is logged as it is, and beside one that was ever not finite stands the
    metric `gradwatch/nonfinite/KEY`: 1 on steps where it is NaN or Inf, 0 on the others from then on.

    MLflow keeps no histograms.

    Closing waits at most 10 s. MLflow's HTTP client draws a jitter from Python's generator when it repeats a failed
    request, and so does its telemetry, which is switched off where the script has not imported MLflow before the watch
    begins (MLFLOW_DISABLE_TELEMETRY decides where it is set). Needs the extra `mlflow`.

    `params` says which parameters get series of their own, `gradwatch/param_COLUMN/NAME`: off, worst (`top_k` seats,
    sticky), match (globs of `match`) or all, at most `max_series` in total; what is left out is counted and reported.
    """

    name = "mlflow"
    close_seconds = 10.0
    takes_histograms = False

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        every: int = DEFAULT_EVERY,
        params: ParamsMode = "off",
        top_k: int = 20,
        max_series: int = 200,
        match: Sequence[str] = (),
    ) -> None:
        require("mlflow", "mlflow")
        choice = ParameterChoice(params, top_k, max_series, tuple(match))
        # MLflow repeats requests for minutes.
        super().__init__(every, BackgroundWorker("gradwatch-mlflow"), choice)
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run_id = ""
        self._owns = False
        self._flagged: set[str] = set()
        self._keys: dict[str, str] = {}
        self._next_list = -math.inf

    def load(self, run: RunInfo) -> None:
        """Import MLflow; see which run is active, and make the experiment in a folder, which only this thread can."""
        used = "mlflow" in sys.modules
        with nullcontext() if used else _without_telemetry():
            import mlflow
        from mlflow.utils.uri import is_local_uri

        active = mlflow.active_run() if used and self._uri is None else None
        self._run_id = active.info.run_id if active else os.environ.get("MLFLOW_RUN_ID", "")
        uri = self._uri or mlflow.get_tracking_uri()
        if not self._run_id and is_local_uri(uri):
            # For every tenth new experiment a store of files draws from Python's generator.
            self._home(mlflow.MlflowClient(uri))

    def start(self, run: RunInfo) -> None:
        """Get a client, and a run."""
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)
        self._owns = self._owns or not self._run_id
        if not self._run_id:
            home = self._home(self._client)
            # A name made by gradwatch: MLflow would draw one from Python's generator.
            name = f"gradwatch-{run.run_id}"
            self._run_id = self._client.create_run(home, run_name=name).info.run_id
        self._client.set_tag(self._run_id, "gradwatch.run_id", run.run_id)

    def send(self, points: Sequence[Point]) -> None:
        """Log in batches; the same points sent twice are two equal ones in a chart."""
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(key, value, int(point.time * 1000), point.step)
            for point in points
            for key, value in self._metrics(point)
        ]
        for begin in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + MOST_METRICS])
        texts = {note.rule: note.text for point in points for note in point.notes}
        if texts:
            tags = [
                RunTag(self._key(f"gradwatch.rule.{rule}"), text[:_LONGEST_TAG])
                for rule, text in texts.items()
            ]
            self._client.log_batch(self._run_id, tags=tags)
        if time.monotonic() >= self._next_list:
            self._log_incidents()

    def finish(self, stopped: bool) -> None:
        """End a run that gradwatch started; never the script's."""
        self._log_incidents()
        if self._owns:
            self._client.set_terminated(self._run_id, "FAILED" if stopped else "FINISHED")

    def _log_incidents(self) -> None:
        if not self._incidents.unsent:
            return
        self._next_list = time.monotonic() + LIST_SECONDS
        try:
            self._client.log_text(self._run_id, self._incidents.markdown(), f"{NAME}.md")
        except Exception as error:  # artifacts may lie elsewhere than metrics, and need other rights
            self._next_list = math.inf
            self._health.notice(self.name, f"{NAME}.md cannot be written: {type(error).__name__}: {error}")
        self._incidents.sent()

    def _home(self, client: Any) -> str:
        """The id of the experiment, made where there is none."""
        experiment = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "gradwatch"
        found = client.get_experiment_by_name(experiment)
        return str(found.experiment_id if found else client.create_experiment(experiment))

    def _metrics(self, point: Point) -> Iterator[tuple[str, float]]:
        for name, value in point.values.items():
            key, finite = self._key(name), math.isfinite(value)
            yield key, value
            if not finite:
                self._flagged.add(name)
            if name in self._flagged:
                flag = self._key(f"{point.prefix}nonfinite/{name.removeprefix(point.prefix)}")
                yield flag, float(not finite)

    def _key(self, name: str) -> str:
        """A key of this name alone: the name itself where MLflow accepts it, else with a hash of it."""
        key = self._keys.get(name)
        if key is None:
            key = _accepted(name)
            if key != name:
                key = f"{key[: _LONGEST_KEY - 9]}-{zlib.crc32(name.encode(errors='replace')):08x}"
            self._keys[name] = key
        return key


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Import MLflow in here, where the script has not: its telemetry would draw from Python's generator in a thread.

    And it was not asked for. Where the environment says something of it, that holds.
    """
    unsaid = _TELEMETRY not in os.environ
    if unsaid:
        os.environ[_TELEMETRY] = "true"
    try:
        yield
    finally:
        if unsaid:
            os.environ.pop(_TELEMETRY, None)


def _accepted(name: str) -> str:
    """Name that MLflow accepts: letters, digits and `_-. /`, no more than 250 of them, and a path in normal form.

    One that it refuses costs the whole batch: `a//b`, `a/` or `a/../b`, too, which names of the script's may hold.
    """
    spelled = re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)[:_LONGEST_KEY]
    of_parts = re.sub(r"/(?=/|$)", "_", spelled)
    return re.sub(r"(?<![^/])\.+(?![^/])", lambda dots: "_" * len(dots[0]), of_parts)
