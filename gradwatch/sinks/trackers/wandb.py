"""Weights & Biases: a run of gradwatch's own, beside the script's.

Never the script's run: a `log` by gradwatch would move its step counter, and W&B drops what is then logged with a step
below it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gradwatch.records.histogram import Histogram, with_zeros
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import BackgroundWorker
from gradwatch.runtime.optional_dependencies import require
from gradwatch.sinks.parameter_selection import ParameterChoice, ParamsMode
from gradwatch.sinks.trackers.incident_list import COLUMNS, NAME, IncidentList
from gradwatch.sinks.trackers.points import PREFIX, Point
from gradwatch.sinks.trackers.tracker import DEFAULT_EVERY, Tracker

ALERT_SECONDS = 60
_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


class WandbSink(Tracker):
    """Logs a point every `every` steps, and of every step on which something happens.

    `project`, `entity` and `group` None are those of the script's own run if it has one by then, else what W&B's
    environment variables say; the project is otherwise called gradwatch. Offline and disabled modes are W&B's
    (`WANDB_MODE`, `wandb offline`). The x axis is the optimizer step. Rules that begin or cease to fire, and causes,
    are texts under `gradwatch/event`, and at the end the last 200 are the table `gradwatch/incidents`; with `alerts`
    W&B also alerts, at most once a minute and rule.

    NaN and Inf are logged as they are; the counter `gradwatch/nonfinite_steps_total` stands beside. No one is
    asked for a key: without one the sink is down, and `Health` says so. Closing waits at most 10 s; W&B itself goes
    on with what is left when the interpreter exits. Needs the extra `wandb`.

    `params` says which parameters get series of their own, `gradwatch/param_COLUMN/NAME`: off, worst (`top_k` seats,
    sticky), match (globs of `match`) or all, at most `max_series` in total; what is left out is counted and reported.
    """

    name = "wandb"
    close_seconds = 10.0

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        every: int = DEFAULT_EVERY,
        alerts: bool = True,
        params: ParamsMode = "off",
        top_k: int = 20,
        max_series: int = 200,
        match: Sequence[str] = (),
    ) -> None:
        require("wandb", "wandb")
        # W&B may wait for its server longer than others can.
        super().__init__(
            every,
            BackgroundWorker("gradwatch-wandb"),
            ParameterChoice(params, top_k, max_series, tuple(match)),
        )
        self._where = {"project": project, "entity": entity, "group": group}
        self._alerts = alerts
        self._prefixes: set[str] = set()
        self._logged: Any = None
        self._step = 0

    def load(self, run: RunInfo) -> None:
        """Import W&B."""
        import wandb  # noqa: F401

    def start(self, run: RunInfo) -> None:
        """Begin a run. PermissionError without a key, for W&B would ask for one on the terminal of the job."""
        import wandb

        settings = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False):
            raise PermissionError("W&B has no API key; set WANDB_API_KEY, or WANDB_MODE=offline")
        self._logged = wandb.init(
            **self._place(wandb.run),
            name=f"gradwatch-{run.run_id}",
            job_type="gradwatch",
            config={
                "run_id": run.run_id,
                "attempt": run.attempt,
                "world_size": run.world_size,
                "rules_digest": run.rules_digest,
                "versions": dict(run.versions),
            },
            reinit="create_new",
            settings=settings,
        )
        self._prefixes.clear()

    def send(self, points: Sequence[Point]) -> None:
        """Log one row per point; W&B's own process takes them from here."""
        for point in points:
            self._declare(point.prefix)
            row: dict[str, Any] = {f"{point.prefix}step": point.step, **point.values}
            row |= {name: _histogram(found) for name, found in point.histograms.items()}
            if point.notes:
                row[f"{PREFIX}event"] = "\n".join(note.text for note in point.notes)
            self._logged.log(row)
            if point.prefix == PREFIX:
                self._step = point.step
            if self._alerts:
                self._alert(point)

    def finish(self, stopped: bool) -> None:
        """End the run; one that a rule stopped counts as failed."""
        if self._incidents.unsent:
            self._logged.log({f"{PREFIX}step": self._step, NAME: _table(self._incidents)})
            self._incidents.sent()
        self._logged.finish(exit_code=int(stopped))

    def _place(self, own: Any) -> dict[str, Any]:
        """Entity, project and group of the run: as asked, else where the script's own run is."""
        place = {key: asked or getattr(own, key, None) or None for key, asked in self._where.items()}
        if not place["project"] and not os.environ.get("WANDB_PROJECT"):
            place["project"] = "gradwatch"
        return place

    def _declare(self, prefix: str) -> None:
        if prefix not in self._prefixes:
            self._prefixes.add(prefix)
            self._logged.define_metric(f"{prefix}step", hidden=True)
            self._logged.define_metric(f"{prefix}*", step_metric=f"{prefix}step")

    def _alert(self, point: Point) -> None:
        for note in point.notes:
            if note.notify:
                self._logged.alert(
                    title=f"gradwatch: {note.rule}",
                    text=note.text,
                    level=_LEVELS[note.severity],
                    wait_duration=ALERT_SECONDS,
                )


def _table(incidents: IncidentList) -> Any:
    import wandb

    return wandb.Table(columns=list(COLUMNS), data=[list(row) for row in incidents.rows()])


def _histogram(found: Histogram) -> Any:
    """Bins over log2 of the magnitude; exact zeros stand in one more below all others."""
    import wandb

    counts, edges = with_zeros(found)
    return wandb.Histogram(np_histogram=(counts, edges))
