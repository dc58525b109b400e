"""The state of rules that people are notified of: when it fired, how often, whether it is over, and its cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwatch.incidents import explanation
from gradwatch.records.event import SEVERITIES, Event, Severity
from gradwatch.records.record import Record

_GRAVER = ("escalated", "failed")  # reported again, and also of a rule that was not reported before
MOST_ALERTS = 256
"""Rules that are kept at a time: as many as a message can be read of, several times over."""
MOST_INCIDENTS = 16
"""Of one alert, whose causes are waited for: a search ends within a few steps."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule of one optimizer since it was last reported: `event` is its first firing, `times` counts them.

    `resolved` is the step at which it was over, None while it fires; `actions` are what was done, or, as
    "would skip_step", held back by shadow mode; `cause` is one sentence, "" where none was found (yet), of one of its
    `incidents`.
    """

    event: Event
    last_step: int
    times: int = 1
    resolved: int | None = None
    actions: tuple[str, ...] = ()
    cause: str = ""
    incidents: tuple[str, ...] = ()
    reported: bool = False
    """True if a message has said that it fires."""

    @property
    def is_news(self) -> bool:
        """True if no message has said yet that it fires, or none that it is over."""
        return self.resolved is not None or not self.reported


class Alerts:
    """The alerts of one run, kept until they have been sent. Not synchronised: the owner holds a lock."""

    def __init__(self, severity: Severity = "info") -> None:
        """Rules below `severity` are not looked at."""
        self._least = SEVERITIES.index(severity)
        self._alerts: dict[tuple[str, int], Alert] = {}
        self.dropped = 0  # rules that fired beside MOST_ALERTS others

    def observe(self, record: Record) -> bool:
        """Take the transitions and causes of one step; True if there is news."""
        news = False
        for event in record.verdict.events:
            news |= self._transition(event, record)
        for finding in record.findings:
            for key, alert in self._alerts.items():
                if finding.incident in alert.incidents and not alert.cause:
                    self._alerts[key] = replace(alert, cause=explanation.sentence(finding))
        return news

    def news(self) -> list[Alert]:
        """The alerts of the next message, in the order in which the rules fired."""
        return [alert for alert in self._alerts.values() if alert.is_news]

    def confirm(self, sent: Sequence[Alert], dropped: int = 0) -> None:
        """Note what a message has said: what is over is discarded, what fires is not news until it is over.

        `dropped` is how many more rules the message said had fired.
        """
        self.dropped -= dropped
        for alert in sent:
            key = alert.event.rule, alert.event.optimizer
            known = self._alerts.get(key)
            if known is None:
                continue
            if alert.resolved is not None and known.resolved == alert.resolved:
                del self._alerts[key]
            else:  # said to be over, and firing again meanwhile: that is news
                self._alerts[key] = replace(known, reported=alert.resolved is None)

    def _transition(self, event: Event, record: Record) -> bool:
        key = event.rule, event.optimizer
        known = self._alerts.get(key)
        if event.kind == "resolved":
            if known is None or known.resolved is not None:
                return False
            self._alerts[key] = replace(known, resolved=event.step)
            return True
        if event.kind not in ("firing", "repeat", "escalated", "failed") or event.inhibited:
            return False
        if known is not None:
            # The same incident goes on, or comes back before the message that it was over.
            done = tuple(dict.fromkeys((*known.actions, *_done(event, record))))
            grew = event.kind in _GRAVER or done != known.actions
            worse = SEVERITIES.index(event.severity) > SEVERITIES.index(known.event.severity)
            self._alerts[key] = replace(
                known,
                event=replace(known.event, severity=event.severity) if worse else known.event,
                last_step=event.step,
                times=known.times + (event.kind == "firing"),
                resolved=None,
                actions=done,
                incidents=_with(known.incidents, event.incident),
                reported=known.reported and not grew,
            )
            return not self._alerts[key].reported
        begins = event.kind in _GRAVER or (event.kind == "firing" and event.notify)
        if not begins or SEVERITIES.index(event.severity) < self._least:
            return False
        if len(self._alerts) >= MOST_ALERTS:
            self.dropped += 1
            return False
        incidents = _with((), event.incident)
        self._alerts[key] = Alert(event, event.step, actions=_done(event, record), incidents=incidents)
        return True


def _with(incidents: tuple[str, ...], name: str) -> tuple[str, ...]:
    return incidents if not name or name in incidents else (*incidents, name)[-MOST_INCIDENTS:]


def _done(event: Event, record: Record) -> tuple[str, ...]:
    """Actions of the rule at this step."""
    orders = (order for order in record.decision.orders if order.rule == event.rule)
    return tuple(sorted({f"would {order.action}" if order.shadow else order.action for order in orders}))
