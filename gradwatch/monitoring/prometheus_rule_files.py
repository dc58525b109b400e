"""The files of Prometheus, from alerts and recording rules to text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradwatch.monitoring.alerts import (
    JOB,
    SERVE_JOB,
    Alert,
    health_alerts,
    other_alert,
    rule_alerts,
    run_alerts,
)
from gradwatch.monitoring.recording_rules import Recording, recordings
from gradwatch.monitoring.scrape_interval import Pace
from gradwatch.monitoring.yaml_text import to_yaml
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.secret_values import holds_password, without_password

_RANK = "{{ $labels.rank }}"
_PROCESS = "{{ with $labels.process }}, process {{ . }}{{ end }}"  # the first of a rank has no such label


@dataclass(frozen=True, slots=True)
class Links:
    """Links of an alert: base URLs of `gradwatch serve` (runbooks) and of Grafana; ValueError for a password in one."""

    serve: str = "http://127.0.0.1:29439"
    grafana: str = "http://127.0.0.1:3000"

    def __post_init__(self) -> None:
        _without_password(self.serve, self.grafana)

    def runbook(self, alert: str) -> str:
        """The page that says what to do about an alert."""
        return f"{self.serve.rstrip('/')}/runbooks/{alert}"

    def dashboard(self, alert: Alert) -> str:
        """The dashboard of the run that alerts, or of all where it is no run that does; a template of Prometheus."""
        place = "gradwatch-run?var-run_id={{ $labels.run_id }}" if alert.of_run else "gradwatch-fleet"
        return f"{self.grafana.rstrip('/')}/d/{place}"


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses for Prometheus: HOST:PORT of Alertmanager and of `gradwatch serve`, and the files
    that training processes write when asked to (`file_sd` of the prometheus sink). By default as in
    compose.yaml. ValueError for a password in one.
    """

    alertmanager: str = "alertmanager:9093"
    serve: str = "serve:29439"
    targets: str = "/targets/*.json"

    def __post_init__(self) -> None:
        _without_password(self.alertmanager, self.serve)


def _without_password(*addresses: str) -> None:
    for address in addresses:
        if holds_password(address):
            raise ValueError(
                f"{without_password(address)} has a user or password, which would be exported in clear"
            )


def alert_groups(ruleset: RuleSet, pace: Pace, links: Links) -> dict[str, Any]:
    """All alerting rules, in the three groups they are evaluated in."""
    parts = {
        "gradwatch-rules": (*rule_alerts(ruleset, pace), other_alert(ruleset, pace)),
        "gradwatch-run": run_alerts(pace),
        "gradwatch-health": health_alerts(pace),
    }
    return {
        "groups": [
            {"name": name, "rules": [alert_rule(alert, links) for alert in group]}
            for name, group in parts.items()
            if group
        ]
    }


def alert_rule(alert: Alert, links: Links) -> dict[str, Any]:
    """One alert as Prometheus spells it."""
    waiting = {"for": alert.for_} if alert.for_ else {}
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **waiting,
        "labels": {**alert.labels, "severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description.replace(_RANK, _RANK + _PROCESS),
            "runbook_url": links.runbook(alert.name),
            "dashboard_url": links.dashboard(alert),
        },
    }


def recording_groups(rules: Iterable[Recording]) -> dict[str, Any]:
    """All recording rules."""
    return {
        "groups": [
            {
                "name": "gradwatch-recordings",
                "rules": [{"record": each.record, "expr": each.expr} for each in rules],
            }
        ]
    }


def server_config(pace: Pace, places: Places) -> dict[str, Any]:
    """prometheus.yml: the scrape targets, and the Alertmanager.

    `honor_labels`: the rank's own `run_id` and `rank` (`gradwatch_run_info`) and those that `gradwatch serve`
    gives to the last counters of an ended run are the ones to keep; both mean the same as the target's.
    """
    found_by_serve = {"url": f"http://{places.serve}/sd", "refresh_interval": pace.interval}
    found_by_file = {"files": [places.targets], "refresh_interval": pace.interval}
    return {
        "global": {"scrape_interval": pace.interval, "evaluation_interval": pace.interval},
        "rule_files": ["rules/*.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [places.alertmanager]}]}]},
        "scrape_configs": [
            {
                "job_name": JOB,
                "honor_labels": True,
                "http_sd_configs": [found_by_serve],
                "file_sd_configs": [found_by_file],
            },
            {
                "job_name": SERVE_JOB,
                "honor_labels": True,
                "static_configs": [{"targets": [places.serve]}],
            },
        ],
    }


def prometheus_rule(ruleset: RuleSet, pace: Pace, links: Links) -> dict[str, Any]:
    """The same rules as an object of the Prometheus operator."""
    groups = alert_groups(ruleset, pace, links)["groups"] + recording_groups(recordings(pace))["groups"]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "gradwatch", "labels": {"app.kubernetes.io/name": "gradwatch"}},
        "spec": {"groups": groups},
    }


def alerts_text(ruleset: RuleSet, pace: Pace, links: Links, comment: str) -> str:
    """Text of `rules/alerts.yml`."""
    return to_yaml(alert_groups(ruleset, pace, links), comment)


def recordings_text(pace: Pace, comment: str) -> str:
    """Text of `rules/recording.yml`."""
    return to_yaml(recording_groups(recordings(pace)), comment)
