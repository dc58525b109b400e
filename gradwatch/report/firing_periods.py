"""Periods in which rules were firing, from the transitions of a journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradwatch.records.event import Event

MOST = 2000
"""Periods kept of those that have ended, the first ones."""


@dataclass(frozen=True, slots=True)
class Period:
    """A rule of one optimizer was firing from step `first` to step `last`, at which it resolved; None = to the end.

    `process` counts those that recorded as this rank; the end is that of this one.
    """

    rule: str
    severity: str
    optimizer: int
    first: int
    last: int | None = None
    process: int = 0


@dataclass(frozen=True, slots=True)
class FiringEnd:
    """The end of the last period of a rule: it resolved at `step`, None = it did not.

    `last`: its process is the last one that recorded.
    """

    step: int | None
    last: bool


class FiringPeriods:
    """Collects the periods of one journal, that of `process`; at most `MOST`."""

    def __init__(self, process: int = 0) -> None:
        self._process = process
        self._open: dict[tuple[int, str], Period] = {}
        self._closed: list[Period] = []
        self._resolved: dict[str, int] = {}

    def take(self, events: Iterable[Event]) -> None:
        """Add transitions, in their order."""
        for event in events:
            key = event.optimizer, event.rule
            if event.kind == "firing" and key not in self._open:
                self._open[key] = Period(
                    event.rule, event.severity, event.optimizer, event.step, process=self._process
                )
            elif event.kind == "resolved":
                self._resolved[event.rule] = event.step  # it may have begun in the journal before this one
                began = self._open.pop(key, None)
                if began is not None and len(self._closed) < MOST:
                    self._closed.append(replace(began, last=event.step))

    def end(self, rule: str, last: bool) -> FiringEnd | None:
        """The end of the last period of a rule, of any optimizer; None where there is none."""
        if any(name == rule for _, name in self._open):
            return FiringEnd(None, last)
        return FiringEnd(self._resolved[rule], last) if rule in self._resolved else None

    def periods(self) -> tuple[Period, ...]:
        """The periods so far, by their first step."""
        return tuple(sorted((*self._closed, *self._open.values()), key=lambda one: (one.first, one.rule)))


def firing_end(rule: str, journals: Sequence[FiringPeriods]) -> FiringEnd | None:
    """The end of a rule's last period in the journals of one rank, the earliest process first."""
    ends = (one.end(rule, one is journals[-1]) for one in reversed(journals))
    return next((end for end in ends if end is not None), None)
