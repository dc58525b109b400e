"""Alerts sent straight to Alertmanager (API v2): no Prometheus has to reach, or outlive, the training process.

For laptops, Slurm nodes that accept no connections, and for what cannot wait for a scrape: the alert of a rule with
`do: [stop]` is on its way before the process ends. Where a Prometheus with the exported alerts watches the same
run, route one of the two (label `via: direct`) to no receiver, or send it twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from gradwatch.records.columns import OBSERVED_ONLY
from gradwatch.records.event import Event
from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.background_worker import Job, background_worker
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.printable import one_line, printable
from gradwatch.sinks.alert_names import alert_name
from gradwatch.sinks.http_post import checked_url, post_json
from gradwatch.sinks.prometheus.file_sd import target_labels
from gradwatch.sinks.prometheus.metric_values import NO_OPTIMIZER

_CLOSE_SECONDS = 2.0
_MOST_ALERTS = 512
_LONGEST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class _Alert:
    """One alert; times are Unix seconds, `ends` None while it fires."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts: float
    ends: float | None = None


class AlertmanagerSink:
    """Posts every rule that fires to the Alertmanager at `url`, and again while it fires.

    An alert lasts at least `hold_seconds`: one that is over before Alertmanager's `group_wait` would reach
    no receiver. It is renewed every `renew_seconds`; of a killed process Alertmanager resolves it after its own
    `resolve_timeout` (5 minutes unless configured).
    `labels` are added to every alert. `runbooks` and `dashboard` are URLs for the links; the alert's name and
    `?var-run_id=` are appended. `token_file` holds a bearer token.

    Nothing is lost to a server that is away for a while: what has changed is kept, per rule, and sent again after
    1, 2, 4 … 60 s. A server's faults are counted as "alertmanager" and never reach training.
    """

    name = "alertmanager"
    needs_place = True

    def __init__(
        self,
        url: str = "http://127.0.0.1:9093",
        hold_seconds: float = 60.0,
        renew_seconds: float = 60.0,
        labels: Mapping[str, str] | None = None,
        runbooks: str | None = None,
        dashboard: str | None = None,
        token_file: str | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not (0 <= hold_seconds < float("inf") and 1 <= renew_seconds < float("inf")):
            raise ValueError("hold_seconds must be 0 or more, renew_seconds 1 or more")
        self._post_url = f"{checked_url(url)}/api/v2/alerts"
        self._hold, self._renew = hold_seconds, renew_seconds
        self._labels = {"job": "gradwatch", "via": "direct", **(labels or {})}
        self._links = (runbooks and checked_url(runbooks), dashboard and checked_url(dashboard))
        self._token_file, self._clock = token_file, clock
        self._lock = threading.Lock()
        self._alerts: dict[tuple[str, int], _Alert] = {}
        self._unsent: set[tuple[str, int]] = set()
        self._stopped = False
        self._run, self._health = RunInfo("", ""), Health()
        self._columns: dict[str, str] = {}
        self._job: Job | None = None

    def open(self, run: RunInfo, health: Health) -> None:
        """Get a worker; nothing is sent before a rule fires."""
        self._run, self._health = run, health
        self._columns = {rule.id: rule.of for rule in run.rules}
        if self._job is None:
            self._job = background_worker().enter(self.name, self._deliver, health)

    def write(self, record: Record) -> None:
        """Note what began and ended at this step; microseconds, and nothing at all on most steps."""
        self._stopped |= record.decision.stop
        if not record.verdict.events or self._job is None:
            return
        observed_only = OBSERVED_ONLY in record.snapshot.scalars
        changed = [self._note(event, observed_only) for event in record.verdict.events]
        if any(changed):
            background_worker().wake(self._job)

    def flush(self, timeout: float) -> bool:
        """Wait until Alertmanager has what is known; False where it has not after `timeout` seconds."""
        if self._job is None or self._job.inherited:
            return True
        with self._lock:
            if not self._unsent:
                return True
        return background_worker().wait_for(self._job, timeout)

    def close(self) -> None:
        """Resolve what fires, unless training was stopped for it, and wait at most 2 s for the last letter."""
        ended, self._job = self._job, None
        if ended is None or ended.inherited:
            return
        now = self._clock()
        with self._lock:
            for key, alert in self._alerts.items():
                if alert.ends is None and not self._stopped:
                    self._end(key, alert, now)
            waiting = bool(self._unsent)
        if waiting and not background_worker().wait_for(ended, _CLOSE_SECONDS):
            self._health.report(self.name, TimeoutError("Alertmanager did not take the last alerts in time"))
        background_worker().leave(ended)

    def _note(self, event: Event, observed_only: bool) -> bool:
        """Take one transition; whether there is something to send."""
        key, now = (event.rule, event.optimizer), self._clock()
        with self._lock:
            known = self._alerts.get(key)
            if event.kind == "resolved" and known is not None and known.ends is None:
                self._end(key, known, now)
                return True
            if event.kind != "firing" or not event.notify or (known is None and self._is_full()):
                return False
            starts = known.starts if known is not None and (known.ends is None or known.ends > now) else now
            self._alerts[key] = _Alert(
                self._labels_of(event, observed_only), self._annotations_of(event), starts
            )
            self._unsent.add(key)
            return True

    def _is_full(self) -> bool:
        return len(self._alerts) >= _MOST_ALERTS

    def _end(self, key: tuple[str, int], alert: _Alert, now: float) -> None:
        self._alerts[key] = replace(alert, ends=max(now, alert.starts + self._hold))
        self._unsent.add(key)

    def _deliver(self) -> float | None:
        """Send what has changed and renew what still fires; in the worker's thread."""
        with self._lock:
            firing = [key for key, alert in self._alerts.items() if alert.ends is None]
            sent = {key: self._alerts[key] for key in {*firing, *self._unsent}}
        if not sent:
            return None
        post_json(self._post_url, [self._document(each) for each in sent.values()], self._token_file)
        self._confirm(sent)
        return self._renew if firing else None

    def _confirm(self, sent: Mapping[tuple[str, int], _Alert]) -> None:
        with self._lock:
            for key, alert in sent.items():
                if self._alerts.get(key) == alert:  # not changed meanwhile
                    self._unsent.discard(key)
                    if alert.ends is not None:
                        del self._alerts[key]

    def _document(self, alert: _Alert) -> dict[str, object]:
        # No end while it fires: an end that was ever given cannot be moved forward again (Alert.Merge).
        ends = {} if alert.ends is None else {"endsAt": _timestamp(alert.ends)}
        return {
            "labels": dict(alert.labels),
            "annotations": dict(alert.annotations),
            "startsAt": _timestamp(alert.starts),
            **ends,
        }

    def _labels_of(self, event: Event, observed_only: bool) -> dict[str, str]:
        several = {"optimizer": str(event.optimizer)} if event.optimizer else {}
        several |= {"optimizer": NO_OPTIMIZER} if observed_only else {}
        given = {**event.labels, **self._labels, **target_labels(self._run), **several}
        own = {
            "alertname": alert_name(event.detector, self._columns.get(event.rule, "")),
            "rule": event.rule,
            "kind": event.detector,
            "severity": event.severity,
        }
        return {name: printable(text) for name, text in {**given, **own}.items() if text}

    def _annotations_of(self, event: Event) -> dict[str, str]:
        runbooks, dashboard = self._links
        name = alert_name(event.detector, self._columns.get(event.rule, ""))
        texts = {
            "summary": event.summary,
            "description": event.description,
            "step": str(event.step),
            "value": f"{event.value:.4g}",
            "score": f"{event.score:.4g}",
            "threshold": f"{event.threshold:.4g}",
            "sites": ", ".join(map(printable, event.sites)),
            "first_cause": event.first_cause,
            "actions": ", ".join(event.actions),
            "incident": event.incident,
            "journal": self._run.directory,
            "host": self._run.host,
            "runbook_url": f"{runbooks}/{name}" if runbooks else "",
            "dashboard_url": f"{dashboard}?var-run_id={self._run.run_id}" if dashboard else "",
        }
        return {key: one_line(text, _LONGEST_TEXT) for key, text in texts.items() if text}


def _timestamp(seconds: float) -> str:
    """RFC 3339."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
