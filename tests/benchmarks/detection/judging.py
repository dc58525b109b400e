"""What judges a recording: a rule file with the engine of gradwatch, or a rival's check; and the alarms it gives.

A judge can be copied at any step, so that a fault is replayed from there on without the steps before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from gradwatch.backtest.rule_judge import RuleJudge
from gradwatch.records.event import Severity
from gradwatch.records.snapshot import Snapshot
from gradwatch.rules.rule_set import RuleSet
from tests.benchmarks.detection.recording import Recording


class Alarm(NamedTuple):
    """A rule begins to fire: at the Snapshot of this number, at this step, with the parameters that it names."""

    place: int
    step: int
    rule: str
    severity: Severity
    sites: tuple[str, ...] = ()
    first_cause: str = ""


class Judge(Protocol):
    """Judges Snapshots one after the other."""

    def judge(self, place: int, snapshot: Snapshot) -> Iterable[Alarm]:
        """The alarms of one step."""

    def copy(self) -> Judge:
        """A judge with what this one has learned; neither learns of the other."""


class RuleFile:
    """The rules of a file. What they would have done is not carried out: the recording goes on as it was made."""

    def __init__(self, ruleset: RuleSet) -> None:
        self._rules = RuleJudge(ruleset)

    def judge(self, place: int, snapshot: Snapshot) -> Iterator[Alarm]:
        """Every rule that begins to fire; not where it is the same incident as a short while ago."""
        for event in self._rules.judge(snapshot).verdict.events:
            if event.kind == "firing" and event.notify:
                yield Alarm(place, snapshot.step, event.rule, event.severity, event.sites, event.first_cause)

    def copy(self) -> RuleFile:
        """A judge with what this one has learned."""
        other = RuleFile.__new__(RuleFile)
        other._rules = self._rules.copy()
        return other


def judged(judge: Judge, snapshots: Sequence[Snapshot], first: int = 0) -> list[Alarm]:
    """The alarms on Snapshots, of which the first has the number `first`."""
    return [alarm for place, one in enumerate(snapshots, first) for alarm in judge.judge(place, one)]


def alarms(ruleset: RuleSet, recording: Recording) -> list[Alarm]:
    """The alarms of a rule file on a recording, in order."""
    return judged(RuleFile(ruleset), recording.snapshots)
