"""One message to people: a subject, plain lines, and the same as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwatch.records.event import SEVERITIES
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.json_numbers import json_number
from gradwatch.runtime.printable import one_line, printable
from gradwatch.sinks.notify.alerts import Alert

MOST_LINES = 20
"""Rules that get a line of their own; of the rest the number is given."""
LONGEST_LINE = 500


@dataclass(frozen=True, slots=True)
class Message:
    """The changes of some rules of a run, worst first; `dropped` rules more have fired; `recorded`: with a journal."""

    run: RunInfo
    alerts: tuple[Alert, ...]
    dropped: int = 0
    recorded: bool = True

    @property
    def status(self) -> str:
        """`firing` as long as a rule of it is, else `resolved`."""
        return "firing" if any(alert.resolved is None for alert in self.alerts) else "resolved"

    @property
    def severity(self) -> str:
        """The worst of its rules."""
        return max((alert.event.severity for alert in self.alerts), key=SEVERITIES.index)

    @property
    def subject(self) -> str:
        """The worst rule and the job, in one line."""
        first, *rest = self.alerts
        more = f" and {len(rest)} more" if rest else ""
        what = f"{printable(first.event.rule)}{more} {self.status}"
        return one_line(f"[{self.severity}] gradwatch: {what} in {_job(self.run)}", LONGEST_LINE)

    @property
    def text(self) -> str:
        """A line per rule, then what to do next."""
        return "\n".join(self._lines())

    def document(self) -> dict[str, Any]:
        """All of it, for programs; numbers that JSON lacks are the strings "NaN", "Infinity", "-Infinity"."""
        return {
            "version": 1,
            "status": self.status,
            "severity": self.severity,
            "subject": self.subject,
            "text": self.text,
            "run": {
                "run_id": printable(self.run.run_id),
                "rank": self.run.rank,
                "host": printable(self.run.host),
                "script": printable(self.run.script),
                "directory": printable(self.run.directory, LONGEST_LINE),
            },
            "alerts": [_alert(alert) for alert in self.alerts],
            "dropped": self.dropped,
        }

    def _lines(self) -> Iterator[str]:
        for alert in self.alerts[:MOST_LINES]:
            yield one_line(_line(alert), LONGEST_LINE)
        more = len(self.alerts) - MOST_LINES + self.dropped if len(self.alerts) > MOST_LINES else self.dropped
        if more:
            yield f"and {more} more rules"
        if self.recorded and self.run.directory:
            yield one_line(f"next: gradwatch explain --run {self.run.directory}", LONGEST_LINE)


def message(run: RunInfo, alerts: Sequence[Alert], dropped: int = 0, recorded: bool = True) -> Message:
    """The message on these alerts: firing before resolved, the worst first."""

    def place(alert: Alert) -> tuple[bool, int]:
        return alert.resolved is not None, -SEVERITIES.index(alert.event.severity)

    return Message(run, tuple(sorted(alerts, key=place)), dropped, recorded)


def _line(alert: Alert) -> str:
    event = alert.event
    rule = printable(event.rule) + (f" (optimizer {event.optimizer})" if event.optimizer else "")
    if alert.resolved is not None and alert.reported:
        return f"resolved: {rule} at step {alert.resolved}, fired at step {event.step}{_times(alert)}"
    over = "" if alert.resolved is None else f", over at step {alert.resolved}"
    parts = [f"[{event.severity}] {rule} at step {event.step}{_times(alert)}{over}: {_values(alert)}"]
    parts += [event.summary.rstrip(".")] if event.summary else []
    parts += [f"cause: {alert.cause}"] if alert.cause else []
    parts += [f"done: {', '.join(alert.actions)}"] if alert.actions else []
    return " · ".join(parts)


def _times(alert: Alert) -> str:
    return f", {alert.times} × until step {alert.last_step}" if alert.times > 1 else ""


def _values(alert: Alert) -> str:
    """The worst parameter, how many there are, and its numbers; a fact (value, score and bound are 1) has none."""
    event = alert.event
    parts = [printable(event.sites[0])] if event.sites else []
    parts += [f"{event.count} parameters"] if event.count > 1 else []
    if not event.value == event.score == event.threshold:
        parts.append(f"value {event.value:.4g}")
        parts += [f"score {event.score:.4g}"] if event.score != event.value else []
        parts.append(f"threshold {event.threshold:.4g}")
    return ", ".join(parts)


def _alert(alert: Alert) -> dict[str, Any]:
    event = alert.event
    return {
        "rule": printable(event.rule),
        "kind": event.detector,
        "severity": event.severity,
        "status": "firing" if alert.resolved is None else "resolved",
        "optimizer": event.optimizer,
        "step": event.step,
        "last_step": alert.last_step,
        "resolved_step": alert.resolved,
        "times": alert.times,
        "parameters": list(map(printable, event.sites)),
        "count": event.count,
        "value": json_number(event.value),
        "score": json_number(event.score),
        "threshold": json_number(event.threshold),
        "summary": one_line(event.summary, LONGEST_LINE),
        "cause": one_line(alert.cause, LONGEST_LINE),
        "actions": list(alert.actions),
        "incident": event.incident,
    }


def _job(run: RunInfo) -> str:
    script = run.script.rsplit("/", 1)[-1]
    where = f"run {printable(run.run_id)}" + (f" on {printable(run.host)}" if run.host else "")
    return f"{printable(script)} ({where})" if script else where
